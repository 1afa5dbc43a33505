"""SQL by which jobs are listed, searched, tagged and grouped, also for MLflow."""
