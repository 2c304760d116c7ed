"""What a model expects next: the likeliest tokens after a text, and how likely they are.

python next_token.py MODEL BUDGET_MIB TEXT
"""

import sys

import pshard
from pshard.errors import UserError


def main(model: str, budget: str, text: str) -> None:
    """One forward pass over the text; logits are float32 [vocabulary], on the host."""
    import torch  # after pshard, which sets what torch reads when it is imported

    with pshard.load(model, vram=int(budget), plan=False) as engine:
        chances = torch.softmax(engine.forward(engine.tokenizer.encode(text)), dim=0)
        for chance, token in zip(*torch.topk(chances, 5)):
            print(f"{chance:6.1%}  {engine.tokenizer.decode([int(token)])!r}")


if __name__ == "__main__":
    if len(sys.argv) != 4 or not sys.argv[2].isdigit():
        raise SystemExit(__doc__)
    try:
        main(*sys.argv[1:])
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
