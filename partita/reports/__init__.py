"""Pages: tables and figures as Markdown and as one HTML file that needs nothing else."""
