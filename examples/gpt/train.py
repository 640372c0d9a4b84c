"""Train a small GPT and keep its checkpoints: killed at any moment and started again, it goes on bit for bit.

Usage:
    ckptstore init ckpts
    python examples/gpt/train.py --store ckpts
    ckptstore -s ckpts ls
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import ckptstore
from ckptstore.torch import ResumableSampler
from data import TextWindows, standard_library_text
from model import GPT, GPTConfig

TEXT_BYTES = 4_000_000


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description="Train a small GPT on the Python standard library.")
    parser.add_argument("--store", required=True, help="where to keep checkpoints; made by `ckptstore init`")
    parser.add_argument("--run", default="gpt", help="the name of the run (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=120, help="steps in all (default: %(default)s)")
    parser.add_argument(
        "--save-every", type=int, default=10, help="steps from save to save (default: %(default)s)"
    )
    parser.add_argument("--batch", type=int, default=4, help="windows of text a step (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--threads", type=int, default=1, help="fixed: sums in another order give other bits")
    parser.add_argument("--fork-from", metavar="RUN", help="begin with the newest weights of that run")
    parser.add_argument("--freeze", type=int, metavar="N", help="leave embeddings and N blocks as they are")
    parser.add_argument("--losses", type=Path, metavar="FILE", help="add a line of JSON for each step's loss")
    parser.add_argument(
        "--final-weights-digest", type=Path, metavar="FILE", help="write the SHA-256 of the last weights"
    )
    return parser.parse_args()


def optimizer_for(model: nn.Module) -> torch.optim.AdamW:
    """AdamW that lets matrices decay, and biases and norms alone."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))


def warmup_then_cosine(step: int, *, steps: int, warmup: int = 10) -> float:
    """The share of the full learning rate at a step: up in a line, then down to a tenth along a cosine."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * progress))


def digest(model: nn.Module) -> str:
    """SHA-256 over names, types, shapes and bytes of all weights."""
    total = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.contiguous().numpy().tobytes())
    return total.hexdigest()


def note_loss(path: Path, step: int, loss: float) -> None:
    """Add one line, at once: what was noted before a kill stays. `hex` loses no bit, as decimals may."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "loss": loss.hex()}) + "\n")


def main() -> None:
    """Train from the newest checkpoint, or from the beginning, to the last step."""
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)

    config = GPTConfig()
    model = GPT(config)
    if args.freeze is not None:
        model.freeze(args.freeze)
    optimizer = optimizer_for(model)
    scheduler = LambdaLR(optimizer, lambda step: warmup_then_cosine(step, steps=args.steps))
    dataset = TextWindows(standard_library_text(TEXT_BYTES), config.context)
    # Each batch depends only on the seed and on how many came before it; the end of the text is no end.
    sampler = ResumableSampler(dataset, seed=args.seed, shuffle=True, infinite=True)
    loader = DataLoader(dataset, batch_size=args.batch, sampler=sampler)

    store = ckptstore.open(args.store)
    run = store.run(args.run)
    state = ckptstore.TrainState(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    start = run.restore(state) or 0  # the random states come along
    if start:
        print(f"resumed from step {start}", flush=True)
    elif args.fork_from:
        origin = store.checkpoint(f"{args.fork_from}@latest")
        run.fork_from(origin)
        origin.restore({"model": model}, only="model.*")
        print(f"forked from {args.fork_from}, step {origin.step}", flush=True)

    model.train()
    batches = iter(loader)
    began = time.perf_counter()
    for step in range(start + 1, args.steps + 1):
        tokens, targets = next(batches)
        logits = model(tokens)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()

        value = loss.item()
        if args.losses:
            note_loss(args.losses, step, value)
        if step % args.save_every == 0 or step == args.steps:
            run.save(step, state, metrics={"loss": value})
            pace = (time.perf_counter() - began) / (step - start)
            print(f"step {step:4}  loss {value:.4f}  {pace:.2f} s/step", flush=True)
    run.close()

    if args.final_weights_digest:
        args.final_weights_digest.write_text(digest(model) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
