# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""48 held-out prompts, six of each of eight kinds, for accepted length and speed.

Not in the training data: its templates and topics are in `sparkgap.train.prompts`, and
a test keeps the two apart.
"""

HELD_OUT: dict[str, tuple[str, ...]] = {
    "facts": (
        "What is the capital of Australia?",
        "Who wrote Romeo and Juliet?",
        "How many bones does an adult human body have?",
        "What is the boiling point of water at sea level?",
        "Which planet in our solar system is the largest?",
        "In which year did the Titanic sink?",
    ),
    "explanation": (
        "Explain why the sky is blue.",
        "How do refrigerators keep food cold?",
        "Why do leaves change colour in autumn?",
        "What causes a rainbow to appear?",
        "How does a microwave oven heat food?",
        "Why is the ocean salty?",
    ),
    "story": (
        "Write a short story about a fox who wanted to fly.",
        "Write a four-line poem about the first day of winter.",
        "Tell me a story about a boy who finds a strange key.",
        "Write a letter from a pirate to his grandmother.",
        "Describe a sunset over the harbour of a fishing town.",
        "Write a scary story that ends well.",
    ),
    "list": (
        "List eight healthy snacks for children.",
        "Give me a packing list for a weekend at the beach.",
        "What are the steps to change a flat tire?",
        "Name six famous inventors and what they invented.",
        "Suggest five names for a pet hamster and explain each.",
        "List the ingredients of a pizza margherita.",
    ),
    "code": (
        "Write a Python function that returns all divisors of a number.",
        "Write a Python class for a bank account with deposit and withdraw methods.",
        "Show me how to make an HTTP request in JavaScript.",
        "Write a SQL query that returns the ten most recent orders.",
        "Write a bash script that renames all .txt files to .md.",
        "Write a Python program that plays rock, paper, scissors.",
    ),
    "sums": (
        "What is 17 multiplied by 24?",
        "A shirt costs 40 dollars and is reduced by 15 percent. What is the new price?",
        "What is the square root of 144?",
        "If I read 30 pages a day, how long do I need for a book of 420 pages?",
        "Add 125, 348 and 79.",
        "A recipe for 4 people needs 300 grams of flour. How much for 10 people?",
    ),
    "rewriting": (
        "Fix the spelling: Teh quik brwon fox jmups over teh lazy dgo.",
        "Turn this into a question: Birds fly south in winter.",
        "Rewrite in a friendly tone: You failed to pay the invoice on time.",
        "Change to the passive voice: The committee approved the new budget.",
        "Expand this note into a full sentence: mtg tmrw 3pm, bring slides.",
        "Rewrite this for a child: The economy contracted in the last quarter.",
    ),
    "chat": (
        "Good morning! How are you today?",
        "I feel nervous about my exam tomorrow.",
        "What should I cook for dinner tonight?",
        "Can you cheer me up?",
        "I just adopted a kitten. Any tips?",
        "Do you think people will live on other planets one day?",
    ),
}
