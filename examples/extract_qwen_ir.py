"""Write the IR of a language model's prefill and decode step, and which of their key/value caches correspond.

python examples/extract_qwen_ir.py PATH/TO/Qwen2.5-0.5B-Instruct --output ir
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from common import positive, run
from qwen import add_model_argument, capture_graphs, checkpoint_of

from npu_compiler.aten.json_writer import save_ir


def main(args: argparse.Namespace) -> None:
    """Run the example."""
    args.output.mkdir(parents=True, exist_ok=True)
    with checkpoint_of(args.model) as checkpoint:
        prefill, decode, mapping = capture_graphs(checkpoint, args.prompt_len, args.max_len)
    for name, graph in (("qwen_prefill", prefill), ("qwen_decode", decode)):
        save_ir(graph, args.output / f"{name}.json")
        print(f"{args.output / name}.json: {len(graph.nodes)} nodes, {len(graph.graph_outputs)} outputs")
    (args.output / "qwen_kv_mapping.json").write_text(json.dumps(mapping, indent=2))
    print(f"{args.output / 'qwen_kv_mapping.json'}: {mapping['num_layers']} layers")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_argument(parser)
    parser.add_argument("--prompt-len", type=positive, default=8, help="prompt length of the prefill graph")
    parser.add_argument("--max-len", type=positive, default=32, help="positions of the caches")
    parser.add_argument("--output", type=Path, default=Path("ir"), help="the folder to write (default: ir)")
    run(main, parser)
