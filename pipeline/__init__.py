"""The framework: stages, graph, plan, runners, placement. It knows no reinforcement learning."""
