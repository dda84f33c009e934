"""Trains the tiny LLaVA from scratch: ``OMP_NUM_THREADS=2 python benchmarks/tiny_llava/train.py --out FOLDER``.

First the vision tower alone learns what is in each patch. Then it is left as it is, and the decoder learns to answer
about two pictures, then about more of them, each time that it can. It is told where to look: without, it does not find
out within a thousand steps what a picture's number is good for. A seed that hangs all the same is given up.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from random import Random

import torch
from build import PICTURES, model, save
from einops import rearrange
from lessons import NOTHING, PATCHES, Lesson, Pictures, layout, lesson, pictures
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlavaForConditionalGeneration

from kvpolicy.eval.pictures.scene import COLORS, SHAPES

POOL = 6000
"""Pictures that the decoder learns from."""
STAGES = (2, 4, PICTURES)
"""How many pictures a prompt has, one stage after the other."""
ENOUGH = 0.9
"""Share of right answers from which on the next stage follows."""
WATCHED = 25
"""Steps over which it is measured."""


def main() -> None:
    """Train, measure, and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tower-steps", type=int, default=900)
    parser.add_argument("--steps", type=int, default=900)
    given = parser.parse_args()
    start = time.monotonic()
    torch.manual_seed(given.seed)
    made = model()
    # The only attention that tells where it looks.
    made.set_attn_implementation("eager")
    train_tower(made, given.tower_steps, given.seed)
    pool, unseen = (
        pictures(count, Random(f"{name} {given.seed}")) for name, count in (("pool", POOL), ("unseen", 1200))
    )
    seen, features = (embedded(made, each) for each in (pool, unseen))
    for seed in range(given.seed, given.seed + 5):
        torch.manual_seed(seed)
        fresh_decoder(made)
        if train_decoder(made, pool, seen, given.steps, seed):
            break
        print(f"decoder seed {seed} hangs: the next one")
    else:
        raise SystemExit("five seeds hang: nothing is written")
    accuracy = score(made, unseen, features, features)
    blind = score(made, unseen, features, features.roll(1, dims=0))
    print(f"unseen pictures {accuracy}, from text alone {blind}, {time.monotonic() - start:.0f} s, decoder seed {seed}")
    save(made, given.out)


def train_tower(made: LlavaForConditionalGeneration, steps: int, seed: int) -> None:
    """Teach the vision tower the color and the shape of the thing in each patch."""
    tower, random = made.model.vision_tower, Random(f"tower {seed}")
    head = nn.Linear(tower.config.hidden_size, len(COLORS) + len(SHAPES) + 2)
    optimizers = muon_and_adam(tower.encoder.layers, [*tower.parameters(), *head.parameters()], rate=3e-3)
    for step in schedule(steps, optimizers):
        batch = pictures(64, random)
        hidden = tower(batch.pixels, output_hidden_states=True).hidden_states[-1][:, 1:]
        # Nothing is a class of its own here.
        labels = batch.labels.where(batch.labels != NOTHING, torch.tensor([len(COLORS), len(SHAPES)]))
        color, shape = head(hidden).split([len(COLORS) + 1, len(SHAPES) + 1], dim=-1)
        loss = sum(
            cross_entropy(rearrange(part, "b p c -> (b p) c"), rearrange(want, "b p -> (b p)"))
            for part, want in ((color, labels[..., 0]), (shape, labels[..., 1]))
        )
        descend(loss, optimizers)
        if step % 100 == 99:
            there = batch.labels[..., 1] != NOTHING
            right = (shape.argmax(-1) == labels[..., 1])[there].float().mean()
            print(f"tower {step + 1}: loss {loss:.3f}, shapes {right:.3f}", flush=True)


def embedded(made: LlavaForConditionalGeneration, given: Pictures) -> Tensor:
    """Return what the tower makes of pictures, ``[n, patches, 96]``."""
    with torch.no_grad():
        parts = [made.model.vision_tower(part, output_hidden_states=True) for part in given.pixels.split(200)]
    return torch.cat([part.hidden_states[-1][:, 1:] for part in parts])


def fresh_decoder(made: LlavaForConditionalGeneration) -> None:
    """Give all but the tower new random weights."""
    other = model()
    made.model.multi_modal_projector.load_state_dict(other.model.multi_modal_projector.state_dict())
    made.model.language_model.load_state_dict(other.model.language_model.state_dict())
    made.lm_head.load_state_dict(other.lm_head.state_dict())


def train_decoder(made: LlavaForConditionalGeneration, pool: Pictures, seen: Tensor, steps: int, seed: int) -> bool:
    """Teach projector and decoder to answer; return False when the seed hangs."""
    decoder, random = made.model.language_model, Random(f"decoder {seed}")
    # What a patch has to know so that a question can find it.
    helper = nn.Linear(decoder.config.hidden_size, len(COLORS) + len(SHAPES) + PICTURES)
    others = [decoder, made.model.multi_modal_projector, made.lm_head, helper]
    weights = [weight for module in others for weight in module.parameters()]
    optimizers = muon_and_adam(decoder.layers, weights, rate=2e-3)
    stage, right, start = 0, Counter[str](), time.monotonic()
    for step in schedule(steps, optimizers):
        many = STAGES[stage]
        given = lesson(pool, random, prompts=32 // many, many=many, each=4)
        said = answered(made, given, seen)
        loss = cross_entropy(rearrange(said.logits, "b q t v -> (b q t) v"), given.answers.flatten())
        labels = pool.labels[given.chosen]
        help_ = 0.3 * helped(helper(said.hidden), labels, given.numbers) + looked(said.attention, given, labels)
        descend(loss + help_, optimizers)
        right.update(rights(said.logits, given))
        right["asked"] += given.at.numel()
        if step % WATCHED == WATCHED - 1:
            shares = {kind: round(3 * right[kind] / right["asked"], 3) for kind in ("color", "shape", "place")}
            print(
                f"decoder {step + 1}: {many} pictures, {shares}, loss {loss:.3f}, {time.monotonic() - start:.0f} s",
                flush=True,
            )
            stage = min(stage + (min(shares.values()) > ENOUGH), len(STAGES) - 1)
            right.clear()
    return STAGES[stage] == PICTURES and min(shares.values()) > ENOUGH


@dataclass(frozen=True)
class Said:
    """What the decoder makes of a lesson.

    Args:
        logits: of each answer and its end, ``[B, Q, 2, words]``.
        hidden: states of patches after the second layer, ``[B, P, patches, d]``.
        attention: what the first two heads of the third layer pay them where answers begin, ``[B, 2, Q, P, patches]``.
    """

    logits: Tensor
    hidden: Tensor
    attention: Tensor


def answered(made: LlavaForConditionalGeneration, given: Lesson, features: Tensor) -> Said:
    """Return what the decoder makes of a lesson about pictures of which the tower makes `features`."""
    image = made.model.multi_modal_projector(features[given.chosen])
    is_image = given.ids == made.config.image_token_index
    embeddings = made.get_input_embeddings()(given.ids)
    embeddings = embeddings.masked_scatter(is_image[..., None], rearrange(image, "b p n d -> (b p n) d"))
    places = is_image[0].nonzero().flatten()
    sees, positions = layout(1 + len(places) // PATCHES * (PATCHES + 3), given.at.shape[1])
    output = made.model.language_model(
        inputs_embeds=embeddings,
        attention_mask=torch.zeros(sees.shape).masked_fill(~sees, -1e9).expand(len(embeddings), -1, -1, -1),
        position_ids=positions,
        output_hidden_states=True,
        output_attentions=True,
        use_cache=False,
    )
    rows = torch.arange(len(given.at))[:, None]
    at = torch.stack([given.at, given.at + 1], dim=-1)
    attention = output.attentions[2][:, :2].transpose(1, 2)[rows, given.at][..., places]
    return Said(
        logits=made.lm_head(output.last_hidden_state[rows[..., None], at]),
        hidden=rearrange(output.hidden_states[2][:, places], "b (p n) d -> b p n d", n=PATCHES),
        attention=rearrange(attention, "b q h (p n) -> b h q p n", n=PATCHES),
    )


def looked(attention: Tensor, given: Lesson, labels: Tensor) -> Tensor:
    """Return the loss of looking elsewhere than at the thing that a question is about.

    Args:
        attention: as of `Said`.
        given: the lesson.
        labels: int64 ``[B, P, patches, 2]``, the color and the shape in each patch.
    """
    color, shape, number = rearrange(given.about, "b q three -> three b q 1 1")
    there = (labels[:, None, ..., 0] == color) & (labels[:, None, ..., 1] == shape)
    there = there & (given.numbers[:, None, :, None] == number)
    mass = (attention * there[:, None]).sum((-2, -1))
    return -(mass + 1e-6).log()[there.any(-1).any(-1)[:, None].expand_as(mass)].mean()


def helped(guess: Tensor, labels: Tensor, numbers: Tensor) -> Tensor:
    """Return the loss of what the first layer says of a patch: its picture's number, color and shape of its thing."""
    color, shape, number = guess.split([len(COLORS), len(SHAPES), PICTURES], dim=-1)
    called = numbers[..., None].expand(labels.shape[:-1])
    pairs = ((color, labels[..., 0]), (shape, labels[..., 1]), (number, called))
    return sum((cross_entropy(part.flatten(0, 2), want.flatten()) for part, want in pairs), torch.zeros(()))


def rights(logits: Tensor, given: Lesson) -> Counter[str]:
    """Return how many questions of each kind are answered right, its end included."""
    right = (logits.argmax(-1) == given.answers).all(-1).tolist()
    each = zip(chain.from_iterable(given.kinds), chain.from_iterable(right), strict=True)
    return Counter(kind for kind, answered_right in each if answered_right)


def score(made: LlavaForConditionalGeneration, unseen: Pictures, features: Tensor, shown: Tensor) -> dict[str, float]:
    """Return the share of right answers about six pictures, by kind; `shown` may be features of other pictures."""
    random, right, prompts = Random("score"), Counter[str](), 50
    for _ in range(8):
        given = lesson(unseen, random, prompts=prompts, many=PICTURES, each=1)
        with torch.no_grad():
            right.update(rights(answered(made, given, shown).logits, given))
    return {kind: right[kind] / (8 * prompts) for kind in ("color", "shape", "place")}


def muon_and_adam(layers: nn.Module, weights: list[nn.Parameter], *, rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of `layers`, and AdamW for all others of `weights`."""
    matrices = [weight for weight in layers.parameters() if weight.ndim == 2]
    others = [weight for weight in weights if not any(weight is one for one in matrices)]
    return [torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0), torch.optim.AdamW(others, lr=rate)]


def schedule(steps: int, optimizers: list[torch.optim.Optimizer]) -> Iterator[int]:
    """Yield each step, with the learning rate set: up in 30 steps, the same, down in the last third."""
    first = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for step in range(steps):
        rate = min((step + 1) / 30, 1, 3.1 * (1 - step / steps))
        for group, whole in zip(groups, first, strict=True):
            group["lr"] = whole * rate
        yield step


def descend(loss: Tensor, optimizers: list[torch.optim.Optimizer]) -> None:
    """Take a step down."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        nn.utils.clip_grad_norm_([weight for group in optimizer.param_groups for weight in group["params"]], 1.0)
        optimizer.step()


if __name__ == "__main__":
    main()
