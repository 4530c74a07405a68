"""Reports as pages: one HTML file without script that loads nothing, for whoever opens it from a disk or a mail."""
