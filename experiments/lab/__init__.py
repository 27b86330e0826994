"""What an experiment is made of, and what runs, judges, keeps and shows it."""
