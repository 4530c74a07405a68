"""How fast, how lossless, on what: suites, interleaved variants, statistics, and the machine's state while
measuring."""
