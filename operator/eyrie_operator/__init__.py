"""Drives jobs and endpoints: pure reconcilers, and two runtimes that apply their actions (`cluster`, `embedded`)."""
