"""OpenAI's endpoints, and the steps that every generating endpoint shares."""
