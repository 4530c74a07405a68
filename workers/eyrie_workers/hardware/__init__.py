"""One drafter and "off" on several machines or parts of a machine, under the same load: speed and money."""
