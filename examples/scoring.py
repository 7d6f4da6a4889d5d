"""How likely a model finds continuations of a text: python examples/scoring.py [MODEL]"""

import sys

import infer

PROMPT = "Once upon a time, there was a clever"
CONTINUATIONS = (" witch", " barrel", " banana")

if __name__ == "__main__":
    with infer.load(sys.argv[1] if len(sys.argv) > 1 else "demo") as llm:
        scores = llm.score(PROMPT, CONTINUATIONS)
    ranked = zip(scores, CONTINUATIONS, strict=True)
    for score, text in sorted(ranked, key=lambda pair: pair[0].logprob, reverse=True):
        print(f"{score.logprob:8.2f}  {PROMPT}{text}")
