"""Log-probs of the rollout against the trainer's for the same tokens: ``python -m benchmarks.logprob_gap --json FILE``.

SGLang samples sequences at temperature 1 and reports each token's log-prob; our trainer computes them again from the
same weights, in bfloat16 as it trains, and in float32 as a reference. The three pairs say where a difference comes
from: rounding on either side, or a computation that is not the same one. With

    d = log π_trainer − log π_rollout

a token is masked by IcePop where exp(d) is outside [1/β, β], by DIS where it is not inside (1 − ε_low, 1 + ε_high),
even though the weights are the same on both sides.

Models: ``dense`` (like SmolLM2-135M) and ``dsa`` (GLM-5's attention and routing, small), each of them

- ``trained`` for some seconds on a language that is learned fast (``language.py``), the indexers after it, or
- ``random``: drawn wide, so that the distribution over the vocabulary is not flat. Rounding grows much more in these.

Cases: ``dense``; ``dsa-short`` stays below the indexer's top k, where it has no say; ``dsa-long`` is past it. Both run
on a server with the radix cache and on one with HiSparse (CUDA only).
"""
