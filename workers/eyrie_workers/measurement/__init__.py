"""How fast, how lossless, on what: suites, interleaved arms, statistics, and the machine's state while measuring."""
