"""The few inner loops worth a kernel; each file is whole: essay, reference, kernel, autograd, bench."""
