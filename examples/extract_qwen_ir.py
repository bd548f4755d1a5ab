"""Write the IR of a Qwen2.5 checkpoint's prefill and decode step, and which of their key/value caches correspond.

python examples/extract_qwen_ir.py PATH/TO/Qwen2.5-0.5B-Instruct --output ir
python examples/extract_qwen_ir.py --tiny --output ir
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from qwen import capture_graphs, checkpoint_of

from npu_compiler.aten.json_reader import save_ir


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a directory with config.json and safetensors")
    parser.add_argument("--tiny", action="store_true", help="a small random model instead")
    parser.add_argument("--prompt-len", type=int, default=8, help="prompt length of the prefill graph")
    parser.add_argument("--max-len", type=int, default=32, help="positions of the caches")
    parser.add_argument("--output", type=Path, default=Path("ir"), help="the folder to write (default: ir)")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = checkpoint_of(args.model, args.tiny, Path(folder) / "tiny-qwen2")
        prefill, decode, mapping = capture_graphs(checkpoint, args.prompt_len, args.max_len)
    for name, graph in (("qwen_prefill", prefill), ("qwen_decode", decode)):
        save_ir(graph, args.output / f"{name}.json")
        print(f"{args.output / name}.json: {len(graph.nodes)} nodes, {len(graph.graph_outputs)} outputs")
    (args.output / "qwen_kv_mapping.json").write_text(json.dumps(mapping, indent=2))
    print(f"{args.output / 'qwen_kv_mapping.json'}: {mapping['num_layers']} layers")


if __name__ == "__main__":
    main()
