"""Changes the messages of a chat to forms that chat templates write completely."""
