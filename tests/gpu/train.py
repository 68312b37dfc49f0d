"""``train_qarl`` with a KV cache of fixed size: ``python -m tests.gpu.train FLAGS``.

Runs that start side by side on one card grow and shrink while vLLM measures how much of the card is free for its cache, and it
takes their memory for its own. Nothing else differs from the command line that users have.
"""

from qarl_openrlhf.cli import train_qarl

KV_CACHE = 2**28  # bytes


def run(args, resources, environment, plain=train_qarl.run) -> None:
    from qarl_openrlhf import patches

    patches.apply()
    from qarl_openrlhf.actors.install import _EngineFactory

    start = _EngineFactory._remote
    _EngineFactory._remote = lambda self, **kwargs: start(self, **kwargs, kv_cache_memory_bytes=KV_CACHE)
    plain(args, resources, environment)


if __name__ == "__main__":
    train_qarl.run = run
    train_qarl.main()
