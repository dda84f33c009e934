"""Pictures to ask about: scenes as plain data, drawn without a library, and the questions that each can be asked."""
