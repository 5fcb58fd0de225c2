# ruff: noqa: E501 (tables of phrases and words)
"""Owns the fixed answers to common questions on Python."""

from __future__ import annotations

# (ways to ask, answer)
ANSWERS: list[tuple[list[str], str]] = [
    (["How do I reverse a list in Python?", "Reverse a list in Python", "How can I reverse a list?"], "Use `items[::-1]` for a copy, or `items.reverse()` in place."),
    (["How do I sort a list in Python?", "How can I sort a list?", "Sort a list in Python"], "Use `sorted(items)` for a copy, or `items.sort()` in place."),
    (["How do I read a file in Python?", "How can I read a file?", "Read a text file in Python"], "```python\nwith open(path) as file:\n    text = file.read()\n```"),
    (["How do I write to a file in Python?", "How can I write a file?", "Write text to a file in Python"],
     "```python\nwith open(path, \"w\") as file:\n    file.write(text)\n```"),
    (["How do I parse JSON in Python?", "How can I read JSON in Python?", "Load JSON from a string"], "```python\nimport json\n\ndata = json.loads(text)\n```"),
    (["How do I write JSON in Python?", "How can I convert a dict to JSON?", "Dump a dict as JSON"], "```python\nimport json\n\ntext = json.dumps(data)\n```"),
    (["How do I make a virtual environment?", "How can I create a venv?", "Create a virtual environment in Python"], "Run `python -m venv .venv`, then `. .venv/bin/activate`."),
    (["What is a list comprehension?", "Explain list comprehensions.", "How do list comprehensions work?"],
     "A list comprehension builds a list from a loop in one expression, for example `[x * x for x in range(5)]`."),
    (["What is a dictionary in Python?", "What is a dict?", "Explain dictionaries in Python."], "A dictionary maps keys to values, for example `{\"a\": 1, \"b\": 2}`."),
    (["What is a tuple?", "What is a tuple in Python?"], "A tuple is an immutable sequence, for example `(1, 2, 3)`."),
    (["What is a set in Python?", "Explain sets in Python."], "A set holds distinct values without order, for example `{1, 2, 3}`."),
    (["What is a generator?", "What is a generator in Python?", "What does yield do?"], "A function with `yield` returns a generator, which produces its values one at a time."),
    (["What is a decorator?", "Explain decorators in Python."], "A decorator is a function that takes a function and returns another one in its place."),
    (["What is a lambda?", "What is a lambda in Python?"], "A lambda is a small function without a name, for example `lambda x: x + 1`."),
    (["How do I loop over a dictionary?", "How can I iterate over a dict?"], "```python\nfor key, value in data.items():\n    print(key, value)\n```"),
    (["How do I catch an exception?", "How do I handle errors in Python?", "How does try work in Python?"],
     "```python\ntry:\n    work()\nexcept ValueError as error:\n    print(error)\n```"),
    (["How do I print in Python?", "Print hello world in Python", "Write hello world in Python.", "Hello world in Python"], "```python\nprint(\"Hello, world!\")\n```"),
    (["How do I define a class in Python?", "How can I write a class?", "Show me a Python class."],
     "```python\nclass Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n```"),
    (["How do I join strings in Python?", "How can I join a list of strings?"], "Use `\", \".join(items)`."),
    (["How do I split a string in Python?", "How can I split a string?"], "Use `text.split()` to split at spaces, or `text.split(\",\")` to split at commas."),
    (["How do I get the length of a list?", "How long is a list in Python?"], "Use `len(items)`."),
    (["How do I get the current time in Python?", "How can I get the current date in Python?"], "```python\nfrom datetime import datetime\n\nnow = datetime.now()\n```"),
    (["How do I list the files in a directory?", "List files in Python"], "```python\nfrom pathlib import Path\n\nfor path in Path(\".\").iterdir():\n    print(path)\n```"),
    (["How do I pick a random number in Python?", "How can I make a random number?"], "```python\nimport random\n\nnumber = random.randint(1, 10)\n```"),
    (["How do I remove duplicates from a list?", "Remove duplicates in Python"], "Use `list(dict.fromkeys(items))`, which keeps the order."),
    (["How do I install a package?", "How do I install a Python package?"], "Run `python -m pip install NAME`."),
]  # fmt: skip

# (what it does, code)
FUNCTION_ANSWERS: list[tuple[str, str]] = [
    ("adds two numbers", "def add(a, b):\n    return a + b"),
    ("multiplies two numbers", "def multiply(a, b):\n    return a * b"),
    ("subtracts two numbers", "def subtract(a, b):\n    return a - b"),
    ("returns the larger of two numbers", "def larger(a, b):\n    return a if a > b else b"),
    ("checks whether a number is even", "def is_even(n):\n    return n % 2 == 0"),
    ("checks whether a number is odd", "def is_odd(n):\n    return n % 2 == 1"),
    ("reverses a string", "def reverse(text):\n    return text[::-1]"),
    ("computes the factorial of a number", "def factorial(n):\n    result = 1\n    for i in range(2, n + 1):\n        result *= i\n    return result"),
    ("computes Fibonacci numbers", "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a"),
    ("checks whether a number is prime", "def is_prime(n):\n    if n < 2:\n        return False\n    for i in range(2, int(n ** 0.5) + 1):\n"
     "        if n % i == 0:\n            return False\n    return True"),
    ("checks whether a string is a palindrome", "def is_palindrome(text):\n    return text == text[::-1]"),
    ("sums a list", "def total(numbers):\n    return sum(numbers)"),
    ("computes the average of a list", "def average(numbers):\n    return sum(numbers) / len(numbers)"),
    ("finds the largest number in a list", "def largest(numbers):\n    return max(numbers)"),
    ("finds the smallest number in a list", "def smallest(numbers):\n    return min(numbers)"),
    ("counts the words in a text", "def count_words(text):\n    return len(text.split())"),
    ("counts the vowels in a string", "def count_vowels(text):\n    return sum(c in \"aeiou\" for c in text.lower())"),
    ("removes duplicates from a list", "def unique(items):\n    return list(dict.fromkeys(items))"),
    ("squares a number", "def square(n):\n    return n * n"),
    ("says hello", "def hello(name):\n    print(f\"Hello, {name}!\")"),
    ("reads a file", "def read(path):\n    with open(path) as file:\n        return file.read()"),
    ("converts Celsius to Fahrenheit", "def to_fahrenheit(celsius):\n    return celsius * 9 / 5 + 32"),
    ("computes the greatest common divisor", "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a"),
    ("sorts a list", "def sort(items):\n    return sorted(items)"),
]  # fmt: skip
