"""The machine a measurement runs on: its description, and the lock that keeps measurements apart."""
