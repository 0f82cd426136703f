"""Texts of unlike lengths, micro-batches, ranks: the mean over all tokens, as one process would take it.

    torchrun --nproc-per-node 2 examples/token_mean.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import plumb

WORDS, WIDTH = 32, 16


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS))
    engine = plumb.Engine(model, plumb.AdamW(lr=1e-2), strategy="zero2", clip_norm=1.0)
    data = torch.Generator().manual_seed(engine.world.rank)
    for step in range(20):
        total, tokens = 0.0, 0
        for _ in range(4):  # micro-batches
            length = int(torch.randint(3, 30, (), generator=data))
            text = torch.randint(0, WORDS, (length + 1,), generator=data).cumsum(0) % WORDS
            loss = F.cross_entropy(model(text[:-1]), text[1:], reduction="sum")
            engine.backward(loss, weight=length)  # step() divides by everybody's tokens
            total, tokens = total + loss.item(), tokens + length
        engine.step()
        engine.zero_grad()
        if engine.world.rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss per token {total / tokens:.3f}")


if __name__ == "__main__":
    main()
