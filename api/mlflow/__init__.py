"""MLflow's REST API for tracking, of which reading is answered."""
