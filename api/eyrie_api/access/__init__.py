"""Who may do what: callers and how they are proved, projects and roles, and the scope by which every row is seen."""
