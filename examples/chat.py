"""A conversation in a terminal, which ends with Ctrl-D: python examples/chat.py [MODEL]

Only what is new is computed for each answer: the conversation so far stays in the KV cache.
"""

import sys

import infer

with infer.load(sys.argv[1] if len(sys.argv) > 1 else "demo") as llm:
    messages: list[dict[str, str]] = []
    while True:
        try:
            messages.append({"role": "user", "content": input("> ")})
        except (EOFError, KeyboardInterrupt):
            break
        while len(llm.encode(messages)) > llm.context * 3 // 4 and len(messages) > 2:
            del messages[:2]  # the oldest question and its answer, so that there is room for one
        with llm.stream(messages) as stream:
            try:
                for chunk in stream:
                    print(chunk.text, end="", flush=True)
            except KeyboardInterrupt:
                pass  # Ctrl-C ends this answer alone
        print()
        messages.append({"role": "assistant", "content": stream.result.text})
