"""Which layers of a cache are evicted from, and how evicting ones take their place."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from kvpolicy.compat import HybridLayer, has_own_index
from kvpolicy.store.layer import EvictingLayer, Owner

KINDS = {
    "DynamicLayer": "full",
    "DynamicSlidingWindowLayer": "sliding",
    "LinearAttentionLayer": "linear",
    "LinearAttentionAndFullAttentionLayer": "linear and full",
    "LinearAttentionAndSlidingWindowAttentionLayer": "linear and sliding",
    "DynamicIndexedLayer": "indexed",
    "DummyLayer": "none",
}
"""What each class of cache layer of transformers' own holds, in words."""


def why_not(cache: Any) -> str:
    """Return why a cache cannot be taken over, or ""."""
    if type(cache) is not DynamicCache:
        return f"its cache is a {type(cache).__name__}; expected a DynamicCache"
    if cache.offloading:
        return "its cache is offloaded; expected a DynamicCache without offloading"
    held = max((layer.get_seq_length() for layer in cache.layers if isinstance(layer, CacheLayerMixin)), default=0)
    if held:
        return f"its cache already holds {held} tokens that this session has not seen; start from an empty one"
    return ""


def evictable_layers(config: Any) -> list[int]:
    """Return the indices of the layers that can evict in a cache of a decoder with this config."""
    return prepare(DynamicCache(config=config), config)


def prepare(cache: Cache, config: Any) -> list[int]:
    """Return the indices of the layers of an empty cache that can evict, after giving it the layers of `config`.

    Those are the layers that keep every token of the sequence, alone or beside a recurrent state. Layers with a
    sliding window, a recurrent state alone or an index of their own, and those that attend to another sequence (an
    image's), are left alone.
    """
    if not cache.layers:
        # Without a config the cache would make plain layers one by one; the decoder's config knows their kinds.
        cache.layers = DynamicCache(config=config).layers
        cache.layer_class_to_replicate = None
    if has_own_index(config):
        return []
    crossing = getattr(config, "cross_attention_layers", None) or ()
    kinds = (DynamicLayer, HybridLayer)
    return [index for index, layer in enumerate(cache.layers) if type(layer) in kinds and index not in crossing]


def take_over(cache: Cache, indices: list[int], owner: Owner) -> None:
    """Put evicting layers in the place of the layers `indices` of an empty cache."""
    for index in indices:
        cache.layers[index] = _evicting(cache.layers[index], index, owner)


def evicting_layers(cache: Any) -> list[EvictingLayer]:
    """Return the evicting layers of a cache; none for a cache that is not ours."""
    return [layer for layer in getattr(cache, "layers", ()) if isinstance(layer, EvictingLayer)]


def lengths(cache: Any) -> set[int]:
    """Return how many tokens the layers of a cache have seen that have seen any: of a whole cache, one number."""
    kinds = (EvictingLayer, DynamicSlidingWindowLayer)
    return {layer.get_seq_length() for layer in cache.layers if isinstance(layer, kinds)} - {0}


def _evicting(layer: Any, index: int, owner: Owner) -> EvictingLayer:
    if type(layer) is DynamicLayer:
        return EvictingLayer(index, owner)
    from kvpolicy.store.hybrid import EvictingHybridLayer

    return EvictingHybridLayer(index, owner, layer.number_of_states)
