"""Many prompts, one after the other: python examples/summaries.py MODEL FILE...

All begin with the same instructions. These are computed once, because a prompt keeps what it has in
common with the one before in the KV cache: so what is common comes first, and the text last.
"""

import sys
from pathlib import Path

import infer

INSTRUCTIONS = """Summarise the text below in one sentence of at most 20 words. Name who did what.
Say nothing that is not in the text, and nothing about the text itself.

"""

if len(sys.argv) < 3:
    sys.exit(__doc__)
model, *files = sys.argv[1:]
prompt_tokens = reused = 0
with infer.load(model) as llm:
    for file in files:
        prompt = INSTRUCTIONS + Path(file).read_text(encoding="utf-8")
        try:
            result = llm.chat(prompt, temperature=0, max_tokens=60)
        except infer.RequestError as error:  # this text is too long; the others may not be
            print(f"{file}: {error}", file=sys.stderr)
            continue
        print(f"{file}: {result.text}", flush=True)
        prompt_tokens += result.prompt_tokens
        reused += result.timings.reused_tokens
print(f"{reused} of {prompt_tokens} prompt tokens were there already", file=sys.stderr)
