"""Generate text with a Qwen2.5 checkpoint and compare every logit with PyTorch's.

python examples/run_qwen.py PATH/TO/Qwen2.5-0.5B-Instruct --prompt "The capital of France is"
python examples/run_qwen.py --tiny
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from qwen import checkpoint_of, torch_logits

from npu_runtime.llm.model import LLM


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a directory with config.json, safetensors and tokenizer.json")
    parser.add_argument("--tiny", action="store_true", help="a small random model instead")
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--max-len", type=int, default=256)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = checkpoint_of(args.model, args.tiny, Path(folder) / "tiny-qwen2")
        llm = LLM.load(checkpoint.path, max_len=args.max_len, cache=not args.tiny)
        prompt = [7, 42, 99, 3, 128, 5] if args.tiny else llm.encode(args.prompt)
        answer = llm.generate(prompt, max_tokens=args.max_tokens)
        for token in answer:
            print(token.id if args.tiny else token.text, end=" " if args.tiny else "", flush=True)
        print(f"\n{answer.timings}")
        tokens = [*prompt, *answer.tokens[:-1]]
        ours, reference = llm.logits(tokens, prompt=len(prompt)), torch_logits(checkpoint, tokens, args.max_len)
    reference = reference[len(prompt) - 1 :]
    error = np.abs(ours - reference).max() / np.abs(reference).max()
    agree = int((ours.argmax(1) == reference.argmax(1)).sum())
    print(
        f"against PyTorch: largest logit error {error:.2e} of the largest logit, {agree} of {len(ours)} choices agree"
    )


if __name__ == "__main__":
    main()
