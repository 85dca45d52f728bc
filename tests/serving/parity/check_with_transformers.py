#!/usr/bin/env python3
"""Checks smollm2_golden.json, which Foveal's tests compare with, against PyTorch: the same GGUF file, dequantised to float32 by
transformers' own loader, must give the same 64 greedy tokens for every prompt.

    python3 -m venv /tmp/torch && /tmp/torch/bin/pip install torch transformers gguf accelerate
    /tmp/torch/bin/python check_with_transformers.py MODEL.gguf
"""

import argparse
import json
import pathlib
import sys

import torch
import transformers


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    path = parser.parse_args().model.resolve()
    golden = json.loads((pathlib.Path(__file__).parent / "smollm2_golden.json").read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    wrong = 0
    for conversation in golden["runs"]:
        prompt = torch.tensor([conversation["prompt_ids"]])
        expected = conversation["generated_ids"]
        generated, cache, ids = [], None, prompt
        with torch.no_grad():
            for _ in expected:
                step = model(ids, past_key_values=cache, use_cache=True)
                cache = step.past_key_values
                ids = step.logits[:, -1].argmax(-1, keepdim=True)
                generated.append(int(ids))
        same = generated == expected
        wrong += not same
        print(f"{'equal' if same else 'DIFFERENT'}: {len(expected)} tokens after {prompt.shape[1]} of the prompt")
    sys.exit(wrong != 0)


if __name__ == "__main__":
    main()
