"""Print an answer as it comes.

python stream_answer.py MODEL BUDGET_MIB PROMPT
"""

import sys

import pshard  # before torch
from pshard.errors import UserError


def main(model: str, budget: str, prompt: str) -> None:
    """Load the model, which may be one of the Hub and is planned at first use, and continue the prompt."""
    with pshard.load(model, vram=int(budget)) as engine:
        for piece in engine.generate(prompt, max_tokens=32):
            print(piece, end="", flush=True)
        print(f"\n{engine.memory().accelerator >> 20} of {budget} MiB used", file=sys.stderr)


if __name__ == "__main__":
    if len(sys.argv) != 4 or not sys.argv[2].isdigit():
        raise SystemExit(__doc__)
    try:
        main(*sys.argv[1:])
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
