# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""What the target is asked while training data is made: templates × topics, 8 kinds.

`sample_prompts` draws from here; the target's own invented user turns join them in
`data.py`. The held-out prompts of `sparkgap.bench.prompts` use other topics and other
wordings; a test keeps the two apart.
"""

import random
from collections.abc import Iterator

TOPICS = (
    """
rivers|glaciers|volcanoes|earthquakes|the water cycle|tides|clouds|lightning|deserts
coral reefs|rainforests|mountains|islands|caves|soil|photosynthesis|pollination|seeds
mushrooms|bacteria|viruses|vaccines|DNA|evolution|dinosaurs|whales|octopuses|bees|ants
spiders|owls|penguins|wolves|elephants|horses|cats|dogs|the human heart|the brain|sleep
muscles|teeth|nutrition|vitamins|exercise|yoga|running|swimming|football|chess|poker
the Moon|Mars|Saturn|black holes|comets|stars|the Big Bang|telescopes|satellites|gravity
magnets|electricity|batteries|light|sound|heat|atoms|chemical bonds|acids|metals
plastics|glass|paper|concrete|bridges|trains|bicycles|airplanes|ships|rockets|engines|clocks
computers|the internet|databases|encryption|search engines|robots|machine learning
programming languages|video games|smartphones|cameras|music theory|the piano|the guitar
opera|painting|sculpture|photography|poetry|novels|theatre|cinema|dance|architecture
the Roman Empire|ancient Egypt|ancient Greece|the Silk Road|the Middle Ages|castles
the printing press|the French Revolution|the Industrial Revolution|the Cold War
democracy|constitutions|elections|taxes|inflation|banks|the stock market|trade|marketing
farming|wheat|rice|coffee|tea|chocolate|cheese|bread|olive oil|spices|soup|pasta|cakes
gardening|knitting|carpentry|camping|hiking|fishing|travelling by train|moving house
learning a language|writing essays|public speaking|job interviews|saving money
time management|friendship|parenting|volunteering|recycling|solar power|wind power
electric cars|public transport|cities|villages|museums|libraries|schools|universities
""".strip()
    .replace("\n", "|")
    .split("|")
)

PEOPLE = (
    """
a young baker|an old sailor|a shy robot|two sisters|a lost dog|a brave mouse
a tired king|a curious child|a retired teacher|a clumsy wizard|an astronaut
a lonely lighthouse keeper
a talking tree|a detective|a painter|a gardener|a night guard|a violin maker|a postman
a small dragon|a queen without a crown|a bus driver|a beekeeper|a librarian|a ghost
""".strip()
    .replace("\n", "|")
    .split("|")
)

PLACES = (
    """
a snowy village|a busy market|the bottom of the sea|an empty train station|a desert town
a floating island|an old library|a city of glass|a small farm|a forest at night
a spaceship|a castle on a hill|a rainy harbour|a museum after closing time
""".strip()
    .replace("\n", "|")
    .split("|")
)

FUNCTIONS = (
    """
reverses a string|counts the vowels in a string|checks whether a number is prime
returns the largest element of a list|sorts a list of numbers|merges two sorted lists
removes duplicates from a list|computes the factorial of a number
returns the nth Fibonacci number|checks whether a word is a palindrome
counts how often each word occurs in a text|converts Celsius to Fahrenheit
computes the average of a list|finds the second largest number|flattens a nested list
reads a file line by line|writes a dictionary to a JSON file|validates an email address
generates a random password|computes the greatest common divisor of two numbers
converts a number to binary|finds all even numbers in a list|transposes a matrix
multiplies two matrices|implements binary search|implements a stack|implements a queue
counts the words in a file|capitalizes every word|checks whether two words are anagrams
sums the digits of a number|prints a multiplication table|finds the longest word
computes compound interest|splits a list into chunks|rotates a list by n places
""".strip()
    .replace("\n", "|")
    .split("|")
)

LANGUAGES = ["Python", "Python", "Python", "JavaScript", "Java", "C++", "Go"]

SENTENCES = """
The meeting has been moved to Thursday because the manager is ill.
We was going to the shop but it were closed.
I am writing to you in order to ask if it would be possible to get a refund.
The dog chased the ball across the garden and jumped into the pond.
Our new product is good and many people like it.
She don't like to eat vegetables but she eat fruit every day.
The results of the experiment were not what we expected them to be.
Due to the fact that it was raining, we decided that we would stay at home.
He is a very very good player and he scored a lot of goals.
Please send me the report as soon as you can, it is urgent.
The old house on the corner was sold last week to a family from the city.
There is many reasons why people move to the countryside.
The train was late, so we missed the beginning of the film.
In my opinion, I think that the plan is not bad, but it could be better.
The children played in the snow until their hands were cold.
Yesterday I goed to the library and borrow three books.
The company has grown quickly and now employs more than two hundred people.
The weather this summer has been hotter than in any year before.
""".strip().split("\n")

TEMPLATES: dict[str, list[str]] = {
    "facts": [
        "What is the most important fact about {topic}?",
        "When did people first learn about {topic}?",
        "Who is known for work on {topic}?",
        "Tell me three facts about {topic}.",
        "What are {topic}?",
        "Where in the world would you go to see {topic}?",
        "Give me a short definition of {topic}.",
        "Is it true that {topic} changed the world?",
    ],
    "explanation": [
        "Explain {topic} to a ten-year-old.",
        "How does {topic} work?",
        "Explain in simple terms why {topic} matters.",
        "What is the difference between {topic} and {other}?",
        "Can you explain the basics of {topic}?",
        "Why do people care about {topic}?",
        "Describe step by step what happens with {topic}.",
        "I don't understand {topic}. Can you help me?",
    ],
    "story": [
        "Write a short story about {person} in {place}.",
        "Write a poem about {topic}.",
        "Tell me a bedtime story about {person}.",
        "Write the first paragraph of a novel set in {place}.",
        "Write a haiku about {topic}.",
        "Write a dialogue between {person} and {person2}.",
        "Describe {place} in a few vivid sentences.",
        "Invent a legend that explains {topic}.",
    ],
    "list": [
        "List five things to know about {topic}.",
        "Give me ten ideas for a project about {topic}.",
        "Make a checklist for someone who starts with {topic}.",
        "What are the pros and cons of {topic}?",
        "Name seven words related to {topic}.",
        "Write a step-by-step plan for learning about {topic}.",
        "Create a weekly schedule for someone interested in {topic}.",
        "What are the main types of {topic}?",
    ],
    "code": [
        "Write a {language} function that {function}.",
        "Show me {language} code that {function}.",
        "How do I write a program in {language} that {function}?",
        "Write a {language} function that {function}, with comments.",
        "Explain this task and solve it in {language}: a function that {function}.",
        "Write a unit test for a {language} function that {function}.",
    ],
    "sums": [
        "What is {a} + {b}?",
        "What is {a} times {c}?",
        "Compute {a} - {b} and show your work.",
        "If one ticket costs {c} dollars, how much do {d} tickets cost?",
        "A train travels {a} km in {d} hours. What is its average speed?",
        "What is {c} percent of {a}?",
        "I have {a} apples and give away {c}. How many are left?",
        "Solve for x: {d}x + {c} = {a}",
        "What is the area of a rectangle of {c} by {d} metres?",
    ],
    "rewriting": [
        "Rewrite this sentence more politely: {sentence}",
        "Correct the grammar: {sentence}",
        "Make this shorter: {sentence}",
        "Translate into French: {sentence}",
        "Rewrite this in the style of a news report: {sentence}",
        "Summarize in five words: {sentence}",
        "Rewrite the following sentence in the past tense: {sentence}",
        "Give me three other ways to say this: {sentence}",
    ],
    "chat": [
        "Hi! Can we talk about {topic}?",
        "I had a long day and thought about {topic}. What do you think?",
        "What do you like about {topic}?",
        "I am bored. Suggest something to do that has to do with {topic}.",
        "Give me some advice: should I spend more time on {topic}?",
        "My friend always talks about {topic}. What could I ask?",
        "Recommend me something to read about {topic}.",
        "Hello, who are you and what do you know about {topic}?",
    ],
}


def sample_prompts(seed: int) -> Iterator[str]:
    """Endless prompts, the kinds in turn, the rest drawn at random from `seed`."""
    draw = random.Random(seed)
    while True:
        for templates in TEMPLATES.values():
            yield draw.choice(templates).format(
                topic=draw.choice(TOPICS),
                other=draw.choice(TOPICS),
                person=draw.choice(PEOPLE),
                person2=draw.choice(PEOPLE),
                place=draw.choice(PLACES),
                function=draw.choice(FUNCTIONS),
                language=draw.choice(LANGUAGES),
                sentence=draw.choice(SENTENCES),
                a=draw.randint(20, 999),
                b=draw.randint(2, 999),
                c=draw.randint(2, 60),
                d=draw.randint(2, 20),
            )
