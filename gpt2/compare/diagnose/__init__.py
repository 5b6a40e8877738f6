"""Why somebody's GPT-2 is almost right."""
