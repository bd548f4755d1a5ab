"""Generate text with a language model and compare every logit with PyTorch's.

python examples/run_qwen.py PATH/TO/Qwen2.5-0.5B-Instruct --prompt "The capital of France is"
python examples/run_qwen.py smollm2-135m
"""

from __future__ import annotations

import argparse

from common import positive, run, show
from qwen import add_model_argument, checkpoint_of, compare, torch_logits

from npu_runtime.llm.model import LLM


def main(args: argparse.Namespace) -> None:
    """Run the example."""
    with checkpoint_of(args.model) as checkpoint:
        llm = LLM.load(checkpoint.path, max_len=args.max_len, cache=args.model is not None)
        prompt = llm.encode(args.prompt)
        show(args.prompt, end="")
        answer = llm.generate(prompt, max_tokens=args.max_tokens)
        for token in answer:
            show(token.text, end="")
        print(f"\n{answer.timings}")
        tokens = [*prompt, *answer.tokens[:-1]]
        reference = torch_logits(checkpoint, tokens, args.max_len)[len(prompt) - 1 :]
        compare(llm.logits(tokens, prompt=len(prompt)), reference)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_argument(parser)
    parser.add_argument("-p", "--prompt", default="The capital of France is")
    parser.add_argument("--max-tokens", type=positive, default=24)
    parser.add_argument("--max-len", type=positive, default=256, help="tokens of the context (default: 256)")
    run(main, parser)
