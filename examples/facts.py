"""Facts out of texts, as JSON lines: python examples/facts.py MODEL FILE...

Every answer is valid under the schema, whatever the model is; this needs the extra `structured`.
"""

import json
import sys
from pathlib import Path

import infer

INSTRUCTIONS = """Who is the text below about, where do they live, and what do they do?

"""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "place": {"type": ["string", "null"], "maxLength": 40},
        "deeds": {"type": "array", "items": {"type": "string", "maxLength": 60}, "maxItems": 3},
    },
    "required": ["name", "place", "deeds"],
    "additionalProperties": False,
}

if len(sys.argv) < 3:
    sys.exit(__doc__)
model, *files = sys.argv[1:]
prompts = [INSTRUCTIONS + Path(file).read_text(encoding="utf-8") for file in files]
with infer.load(model) as llm:
    results = llm.chat(prompts, schema=SCHEMA, max_tokens=200)  # generated together
for file, result in zip(files, results, strict=True):
    if result.finish_reason != "stop":  # it has not come to its end
        print(f"{file}: the answer is too long", file=sys.stderr)
        continue
    print(json.dumps({"file": file} | json.loads(result.text), ensure_ascii=False))
