"""What other frameworks' configurations become: one package each, chosen by its name (`import.<name>=PATH`)."""
