"""Speed, acceptance and losslessness of a drafter: benchmark, tuner, parity with the serving engine."""
