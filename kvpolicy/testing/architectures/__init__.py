"""Does eviction work on every class of the installed transformers? ``python -m kvpolicy.testing.architectures`` tells.

Every class that transformers maps to text or image-text generation is built tiny, with random weights, and judged:
"correct" where an evicted cache gives the logits of a full one whose mask hides what was evicted, "refused" where
kvpolicy says why it cannot act, "not built" where transformers itself cannot build or run the tiny model on text.
Anything else is "wrong".
"""
