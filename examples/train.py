"""A small language model over made-up text: one line of plumb in a plain loop. Alone, or on every rank of torchrun:

    python examples/train.py
    torchrun --nproc-per-node 2 examples/train.py zero3
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import plumb

VOCABULARY, WIDTH, LENGTH = 64, 64, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        result: torch.Tensor = self.mix(x, src_mask=mask, is_causal=True)
        return result


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight  # tied

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.blocks(self.tokens(text)))
        return result


def main() -> None:
    strategy = sys.argv[1] if len(sys.argv) > 1 else "ddp"
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    engine = plumb.Engine(model, optimizer, strategy=strategy, units=[Block], clip_norm=1.0)

    data = torch.Generator().manual_seed(engine.world.rank)  # each rank its own share
    for step in range(50):
        start = torch.randint(0, VOCABULARY, (8, 1), generator=data)
        text = (start + 3 * torch.arange(LENGTH + 1)) % VOCABULARY
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        info = engine.step()
        schedule.step()
        optimizer.zero_grad()
        if engine.world.rank == 0 and step % 10 == 9 and info.grad_norm is not None:
            print(f"step {step + 1}: loss {loss.item():.3f}, gradient norm {info.grad_norm.item():.2f}")


if __name__ == "__main__":
    main()
