"""What the HTML reports share: templates, charts, escaping."""
