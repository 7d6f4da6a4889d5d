"""An answer that may call functions: python examples/tools.py MODEL QUESTION

The model was trained for that, as Qwen/Qwen3-0.6B was: "How many days are left in this year?"
"""

import sys
from datetime import date
from typing import Any

import infer


def today() -> str:
    """The date of today, as YYYY-MM-DD."""
    return date.today().isoformat()


def days_between(start: date, end: date) -> str:
    """Days from one date to another."""
    return str((end - start).days)


FUNCTIONS = {function.__name__: function for function in (today, days_between)}
MOST_TURNS = 5

if len(sys.argv) != 3:
    sys.exit(__doc__)
model, question = sys.argv[1:]
messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
with infer.load(model) as llm:
    for _ in range(MOST_TURNS):
        result = llm.chat(messages, tools=list(FUNCTIONS.values()))
        messages.append(result.message)
        if not result.tool_calls:
            break
        for call in result.tool_calls:
            try:
                content = FUNCTIONS[call.name](**call.parsed())
            except (TypeError, ValueError) as error:  # told of a mistake, models often mend it
                content = f"error: {error}"
            print(f"{call.name}({call.arguments}): {content}", file=sys.stderr)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
print(result.text)
