"""How likely a model finds continuations of a text: python examples/scoring.py [MODEL]"""

import sys

import numpy as np

import infer

PROMPT = "Once upon a time, there was a clever"
CONTINUATIONS = (" witch", " barrel", " banana")


def log_likelihood(llm: infer.LLM, prompt: str, continuation: str) -> float:
    """The log probability of a continuation, which begins where a token of its own does."""
    begin, ids = len(llm.encode(prompt)), llm.encode(prompt + continuation)
    logits = llm.logits(ids)[begin - 1 : -1].astype(np.float64)  # what follows each token
    logprobs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    return float(logprobs[np.arange(len(logprobs)), ids[begin:]].sum())


if __name__ == "__main__":
    with infer.load(sys.argv[1] if len(sys.argv) > 1 else "demo") as llm:
        scores = {text: log_likelihood(llm, PROMPT, text) for text in CONTINUATIONS}
    for text in sorted(scores, key=scores.__getitem__, reverse=True):
        print(f"{scores[text]:8.2f}  {PROMPT}{text}")
