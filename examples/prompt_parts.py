"""What make_prompts.py fills its prompts with: templates for each kind of request, and words for their gaps."""

FIELDS: dict[str, str] = {
    "topic": """
        gravity; photosynthesis; the water cycle; volcanoes; earthquakes; black holes; the solar system;
        electricity; magnetism; sound waves; the immune system; vaccines; DNA; evolution; the food chain;
        plate tectonics; climate change; renewable energy; recycling; nuclear power; batteries; the
        internet; computer viruses; machine learning; databases; operating systems; encryption; inflation;
        supply and demand; taxes; interest rates; the stock market; insurance; mortgages; budgeting;
        democracy; elections; the constitution; human rights; the Roman Empire; ancient Egypt; the
        Renaissance; the Industrial Revolution; the Cold War; the French Revolution; the Silk Road; the
        printing press; jazz; classical music; opera; photography; painting; sculpture; architecture;
        theatre; ballet; chess; football; basketball; tennis; swimming; running; yoga; meditation; sleep;
        nutrition; vitamins; exercise; stress; memory; language learning; reading; public speaking; time
        management; teamwork; leadership; negotiation; marketing; gardening; beekeeping; composting;
        pottery; knitting; woodworking; bird watching; astronomy; chemistry; algebra; geometry;
        probability; statistics; prime numbers; fractions; philosophy; ethics; psychology; sociology;
        economics; tides; clouds; rainbows; lightning; glaciers; deserts; rainforests; coral reefs; the
        ozone layer; soil; rivers; bridges; aeroplanes; submarines; trains; bicycles; electric cars;
        rockets; satellites; telescopes; microscopes; lasers; X-rays; antibiotics; blood pressure; the
        human heart; the brain; bones; the digestive system; allergies""",
    "animal": """
        dolphin; elephant; penguin; owl; tiger; octopus; honeybee; ant; butterfly; whale; shark; kangaroo;
        koala; giraffe; zebra; wolf; fox; bear; rabbit; squirrel; beaver; otter; hedgehog; bat; eagle;
        parrot; flamingo; turtle; crocodile; snake; frog; salmon; cat; dog; horse; cow; goat; camel;
        panda; gorilla""",
    "place": """
        London; Cairo; Sydney; Mexico City; Berlin; Toronto; Nairobi; Mumbai; Seoul; Lima; Oslo; Athens;
        Dublin; Chicago; Boston; Vienna; Madrid; Moscow; Bangkok; Singapore; Istanbul; Lagos; Stockholm;
        Prague; Warsaw; Havana; Jakarta; Helsinki; Zurich; Amsterdam""",
    "country": """
        Canada; Brazil; Egypt; India; China; Germany; Spain; Italy; Kenya; Australia; Argentina; Norway;
        Greece; Turkey; Vietnam; South Africa; Poland; Sweden; Peru; Thailand; Ireland; Nigeria; Chile;
        Indonesia; Morocco""",
    "person": """
        Albert Einstein; Marie Curie; Isaac Newton; Charles Darwin; Nelson Mandela; Mahatma Gandhi;
        Cleopatra; Leonardo da Vinci; William Shakespeare; Jane Austen; Mozart; Beethoven; Pablo Picasso;
        Vincent van Gogh; Abraham Lincoln; Winston Churchill; Ada Lovelace; Alan Turing; Galileo Galilei;
        Thomas Edison; Nikola Tesla; Florence Nightingale; Rosa Parks; Julius Caesar; Aristotle; Plato;
        Socrates; Confucius; Amelia Earhart""",
    "name": """
        Anna; Tom; Maria; David; Sara; Peter; Lucy; John; Emma; Ben; Nina; Paul; Clara; Sam; Olivia; Jack;
        Priya; Omar; Mei; Carlos; Fatima; Ivan; Grace; Leo; Hannah; Max; Zoe; Daniel; Amir; Julia""",
    "job": """
        teacher; nurse; pilot; baker; carpenter; plumber; farmer; lawyer; doctor; engineer; journalist;
        librarian; firefighter; police officer; chef; waiter; mechanic; electrician; architect; dentist;
        accountant; software developer; graphic designer; photographer; musician; sailor; astronaut;
        gardener; tailor; bus driver""",
    "thing": """
        umbrella; suitcase; lamp; mirror; clock; bicycle; guitar; piano; camera; notebook; backpack;
        kettle; blanket; ladder; hammer; pencil; telephone; radio; coat; pair of glasses; candle; key;
        map; compass; lighthouse; boat; train; toy robot; music box; treasure chest""",
    "feeling": """
        happy; sad; nervous; tired; proud; lonely; angry; excited; bored; grateful; confused; hopeful;
        scared; calm""",
    "skill": """
        play the guitar; swim; cook; draw; dance; write better; speak Spanish; code in Python; save money;
        sleep better; make friends; stay focused; get fit; manage stress; learn chess; take good photos;
        give a speech; read faster; remember names; wake up early; paint a room; fix a bicycle; grow
        tomatoes; train a puppy; study for an exam; prepare for a job interview; write a résumé; start a
        small business; choose a laptop; clean a kitchen""",
    "company": """
        a bank; a bookshop; a hospital; a small bakery; a software company; a travel agency; a school; a
        gym; a hotel""",
    "word": """
        ambitious; fragile; curious; generous; reluctant; brilliant; ancient; peculiar; delicate; fierce;
        humble; vivid; abundant; cautious; eager; gloomy; harmony; journey; obstacle; patience; resilient;
        scarce; tranquil; vague; wisdom""",
    "function": """
        reverses a string; checks whether a number is prime; computes the factorial of a number; sorts a
        list of numbers; finds the largest number in a list; counts the vowels in a string; checks whether
        a word is a palindrome; removes duplicates from a list; computes the Fibonacci sequence; merges
        two sorted lists; counts words in a text; converts Celsius to Fahrenheit; computes the average of
        a list; finds the common elements of two lists; flattens a nested list; reads a file and counts
        its lines; generates a random password; computes the area of a circle; finds the greatest common
        divisor of two numbers; checks whether two strings are anagrams; adds two matrices; sums the even
        numbers in a list; finds the second largest number; capitalizes each word; converts a number to
        binary""",
    "language": "Python; Python; Python; JavaScript; Java; C; Rust; Go",
    "tongue": "French; Spanish; German; Italian; Portuguese",
    "phrase": """
        Good morning, how are you?; Where is the train station?; I would like a cup of tea.; Thank you
        very much.; The weather is nice today.; My name is Anna.; How much does it cost?; I love this
        city.; See you tomorrow.; The book is on the table.; We are going to the beach.; I do not
        understand.; Can you help me?; The cat is sleeping.""",
    "opinion": """
        The film was wonderful and I would watch it again.; The food was cold and the waiter was rude.;
        The phone works, nothing special.; I waited two hours and nobody came.; What a beautiful concert!;
        The shoes fell apart after a week.; The staff were friendly and the room was clean.; It arrived on
        Monday.; I am so disappointed with this update.; Best holiday of my life.; The book was fine, but
        too long.""",
    "tone": "formal; polite; friendly; professional; simple; cheerful",
    "rough": """
        hey can u send me the file asap; the meeting is off coz the boss is sick; i dont like ur idea at
        all; gotta go now, talk later; we need more money for this thing; sorry i was late again; this
        report is a mess, fix it; u should of told me before; me and him was going to the shop; the
        results aint good this month""",
    "n": "3; 4; 5; 6; 7; 8; 10",
    "a": "3; 7; 9; 12; 15; 18; 24; 36; 45; 60",
    "b": "2; 3; 4; 5; 6; 8; 9",
    "fruit": "apples; pears; marbles; books; stickers; coins; cards; pencils; eggs; tickets",
    "century": "15th; 16th; 17th; 18th; 19th; 20th",
    "season": "spring; summer; autumn; winter",
    "event": """
        a birthday party; a wedding; a school play; a charity run; a team meeting; a farewell dinner; a
        book club""",
    "problem": """
        my computer is slow; my phone does not charge; I cannot sleep at night; my plants are dying; I
        forget things; I am always late; my neighbour is noisy; my car does not start; I spend too much
        money; I feel tired all day; my child does not like vegetables; I argue with my sister; my email
        is full of spam; my back hurts after work""",
}

KINDS: dict[str, tuple[str, ...]] = {
    "question": (
        "What is {topic}?",
        "Why is {topic} important?",
        "How does {topic} work?",
        "Who discovered or invented {topic}?",
        "What are the main causes and effects of {topic}?",
        "When did people first learn about {topic}?",
        "Is it true that a {animal} can live for more than twenty years?",
        "What does a {animal} eat?",
        "What is the capital of {country}, and what is it known for?",
        "Why do people feel {feeling}?",
        "What does a {job} do all day?",
    ),
    "explanation": (
        "Explain {topic} to a ten-year-old.",
        "Explain {topic} in simple words.",
        "Give me a short introduction to {topic}.",
        "Explain {topic} in two paragraphs, with an example.",
        "I know nothing about {topic}. Where should I start?",
        "Describe {topic} in three sentences.",
        "Teach me the basics of {topic}.",
        "What should every student know about {topic}?",
        "Explain the history of {topic}.",
    ),
    "list": (
        "List {n} facts about {topic}.",
        "List {n} things that one can do in {place} in {season}.",
        "Name {n} famous people from {country}.",
        "Give me {n} tips on how to {skill}.",
        "What are {n} benefits of {topic}?",
        "List {n} tools that a {job} uses.",
        "Give me {n} examples of {topic} in daily life.",
        "Name {n} animals that live near a {animal}.",
        "Write a bulleted list about {topic}.",
        "Give me {n} books or films about {topic}.",
    ),
    "story": (
        "Write a short story about a {animal} and a {job}.",
        "Tell me a bedtime story about {name} and a lost {thing}.",
        "Write a story that begins with: {name} found an old {thing} in the attic.",
        "Write a short story set in {place} about a {feeling} {job}.",
        "Write a fairy tale about a {animal} who wanted to {skill}.",
        "Continue this story: It was a dark night in {place}, and {name} heard a strange noise.",
        "Write the beginning of a mystery novel about a missing {thing}.",
        "Tell me a funny story about a {job} in {country}.",
    ),
    "email": (
        "Write an email to my boss asking for a day off because I am {feeling}.",
        "Write a short email inviting {name} to {event}.",
        "Write an email to {company} to ask about prices.",
        "Write a thank-you email to {name}, a {job}, for the help with {topic}.",
        "Write an email to {name} that says I will be late for {event}.",
        "Draft a {tone} email that announces {event} in {place}.",
        "Write an email to apologise to {name} for losing the {thing}.",
    ),
    "summary": (
        "Summarise this text in one sentence.\n\n{passage}",
        "Summarise:\n{passage}",
        "What is the main idea of this passage?\n\n{passage}",
        "Give a short summary of the following text. {passage}",
        "Make three bullet points of this text:\n\n{passage}",
        "Find a title for this text: {passage}",
    ),
    "reading": (
        "{passage}\n\nWho is this text about, and what did they do?",
        "Read the text and answer the question.\n{passage}\nQuestion: where does it take place?",
        "{passage}\n\nAnswer: what happened at the end?",
    ),
    "rewriting": (
        "Rewrite this in a {tone} way: {rough}",
        "Correct the grammar: {rough}",
        "Make this sentence longer and more vivid: The {animal} sat near the {thing}.",
        "Rewrite in the past tense: {name} goes to {place} and buys a {thing}.",
        "Rewrite this text in simpler words.\n\n{passage}",
        "Turn this into a question: {name} lives in {place}.",
        "Rewrite this from the first person: {passage}",
    ),
    "translation": (
        "Translate into {tongue}: {phrase}",
        'How do you say "{phrase}" in {tongue}?',
        "What is the {tongue} word for {animal}?",
    ),
    "code": (
        "Write a {language} function that {function}.",
        "Write a program in {language} that {function}, and explain it.",
        "Show me a short {language} example that {function}.",
        "How would I write a {language} function that {function}? Add comments.",
        "Write {language} code that {function} and a test for it.",
        "What is the difference between a list and a dictionary in {language}?",
        "Explain what a loop is in {language}, with an example.",
    ),
    "arithmetic": (
        "{name} has {a} {fruit} and gives {b} to a friend. How many are left?",
        "What is {a} plus {b}?",
        "What is {a} times {b}? Show your work.",
        "{name} buys {b} boxes of {fruit}, with {a} in each. How many is that?",
        "A train travels {a} miles in {b} hours. What is its average speed?",
        "Solve for x: {b}x + {a} = {a}.",
        "If {a} {fruit} are shared among {b} children, how many does each get?",
        "What is {b} percent of {a}?",
    ),
    "roleplay": (
        "You are a {job}. Tell me about your day.",
        "Pretend that you are a {animal} and introduce yourself.",
        "Act as a {job} and give me advice: {problem}.",
        "Imagine you are {person}. What would you say about {topic}?",
        "You are a friendly guide in {place}. Welcome your guests.",
    ),
    "classification": (
        "Is this review positive, negative or neutral? {opinion}",
        "Classify the sentiment: {opinion}",
        "Is a {animal} a mammal, a bird, a fish, a reptile or an insect?",
        "Which of these does not belong: {animal}, {thing}, dog? Explain.",
        "Is this sentence formal or informal? {rough}",
    ),
    "facts": (
        "Tell me about {person}.",
        "Tell me something interesting about {place}.",
        "What is {country} famous for?",
        "Describe the life of a {animal}.",
        "What was life like in {country} in the {century} century?",
        "Why is {person} remembered today?",
        "What languages are spoken in {country}?",
        "Tell me about the climate of {country}.",
    ),
    "comparison": (
        "Compare a {animal} with a {animal}.",
        "What is the difference between {topic} and {topic}?",
        "Which is better for a beginner, {topic} or {topic}?",
        "How does life in {place} differ from life in {place}?",
        "Compare the work of a {job} with that of a {job}.",
    ),
    "advice": (
        "How can I {skill}?",
        "I want to {skill}. What should I do first?",
        "{problem}. What can I do?",
        "I feel {feeling} today. What can I do about it?",
        "How do I become a {job}?",
        "What should I say to a friend who is {feeling}?",
        "How do I explain {topic} to my grandmother?",
    ),
    "words": (
        'What does the word "{word}" mean?',
        'Use the word "{word}" in three sentences.',
        'Give me synonyms of "{word}".',
        'What is the opposite of "{word}"?',
        "Define {topic}.",
    ),
    "ideas": (
        "Suggest {n} names for {company}.",
        "Write a slogan for {company} in {place}.",
        "Write a short advertisement for a {thing}.",
        "Give me {n} ideas for {event}.",
        "Suggest a gift for a {job} who loves {topic}.",
        "Write a social media post about {event} in {place}.",
    ),
    "conversation": (
        "Hi! How are you?",
        "Hello, my name is {name}. I am a {job} from {country}.",
        "Good morning! I have a question about {topic}.",
        "Can you help me? {problem}.",
        "What can you do for me?",
        "I am {feeling} today.",
        "Thank you, that was helpful!",
        "Tell me something about {topic} that will surprise me.",
    ),
    "outline": (
        "Make an outline of a lecture about {topic}.",
        "Outline a book about {person} in {n} chapters.",
        "What sections should a report about {topic} in {country} have?",
        "Plan a presentation about {topic} with {n} slides.",
        "Write a lesson plan about {topic} for one hour.",
    ),
    "review": (
        "Write a review of a hotel in {place}.",
        "Write a bad review of a {thing} that broke after {n} days.",
        "Review a film about a {job} who wanted to {skill}.",
        "Write a short, {tone} review of {company} in {place}.",
        "Recommend a book about {topic} and say why.",
    ),
    "biography": (
        "Write a short biography of {person}.",
        "Give a timeline of the life of {person}.",
        "Write a profile of {name}, a {job} from {country}.",
        "Who was {person}, and what did they believe?",
        "List the main works or deeds of {person}, with years.",
    ),
    "description": (
        "Describe a {thing} so that a blind person can imagine it.",
        "Describe {place} at night.",
        "Write a product description for a {thing} made in {country}.",
        "Describe a character for a novel: a {feeling} {job} named {name}.",
        "Describe the smell and the sounds of a market in {place}.",
        "Paint a picture in words of a {animal} in {season}.",
    ),
    "what-if": (
        "What would happen if there were no {topic}?",
        "Imagine that every {animal} could speak. How would life change?",
        "What if {person} lived today?",
        "Suppose {country} had no {season}. What would people do?",
        "If you could ask {person} one thing, what would it be?",
    ),
    "checklist": (
        "Make a checklist for {event}.",
        "What do I need before I {skill}?",
        "Write a to-do list for a {job} on a Monday.",
        "Make a daily schedule for someone who wants to {skill}.",
        "Make a study plan of {n} days about {topic}.",
    ),
    "notice": (
        "Write an announcement about {event} for the town of {place}.",
        "Write a notice that {company} will be closed in {season}.",
        "Write a warning sign about a {animal} in a park.",
        "Write a job advertisement for a {job} at {company}.",
        "Write a voicemail greeting for {company}.",
        "Write a text message to {name} about the {thing}.",
    ),
    "glossary": (
        "Explain {n} important terms of {topic}.",
        "Make a glossary of {topic} with {n} entries.",
        "What is the plural of {animal}, and how is it spelled?",
        "Where does the word {word} come from?",
        'Explain the proverb "Practice makes perfect" to a {job}.',
    ),
    "data": (
        "Write a CSV file with {n} rows about {fruit}: name, colour, price.",
        "Write a YAML file that describes a {thing} with {n} properties.",
        "Sort these words: {word}, {animal}, {thing}, {place}.",
        "Count from {b} to {a}.",
        "Write the first {a} multiples of {b}.",
        "Convert {a} miles to kilometres.",
        "What day comes {b} days after Monday?",
        "Give an XML example of an order of {a} {fruit}.",
    ),
    "debugging": (
        "My {language} program that {function} gives the wrong result. How do I find the error?",
        "What does this code do?\n\nfor i in range({b}):\n    print(i * {a})",
        "Write a class in {language} for a {thing} with a name and a price.",
        "Name {n} common mistakes in {language}.",
        "How do I install {language} on my computer?",
        "Explain what a variable is in {language} to a {job}.",
    ),
    "essay": (
        "Write an essay about {topic}.",
        "Write one paragraph about how {topic} changed the world.",
        "Write an introduction for an article on {topic}.",
        "Write a conclusion for an essay about {topic}.",
        "Describe a {season} day in {place}.",
        "Write a short speech about {topic} for a school.",
    ),
}

PASSAGES: tuple[str, ...] = (
    "{name} worked as a {job} in {place} for many years.",
    "Every {season}, {name} travelled to {country} to learn more about {topic}.",
    "One morning a {animal} appeared at the door, and nobody knew where it came from.",
    "The old {thing} in the corner had belonged to a {job} who once met {person}.",
    "Many people in {country} are interested in {topic}, and schools have begun to teach it.",
    "Scientists say that {topic} will matter more in the years to come.",
    "{name} and {name} opened {company} near the river, and at first few customers came.",
    "In the {century} century, {place} was a much smaller town.",
    "The {animal} is one of the most loved animals there, although it is rarely seen.",
    "A new law protects the {animal} and the places where it lives.",
    "After {n} months, the work was done, and everyone was {feeling}.",
    "Some visitors asked about {topic}, and the guide explained it with a {thing}.",
    "The prices rose by {b} percent, so {name} decided to {skill}.",
    "In the end {name} sold the {thing} and moved to {place}.",
    "The report, written by a {job}, names {n} reasons for this.",
    "It rained for {n} days, and the streets of {place} were empty.",
    "{name} had always wanted to {skill}, but there had never been time.",
    "At the end of the day they celebrated with {event}.",
)

SYSTEMS: tuple[str, ...] = (
    "You are a helpful assistant.",
    "You are a {tone} assistant who gives short answers.",
    "You are an expert on {topic}.",
    "You are a {job}. Answer in plain words.",
    "Answer in one or two sentences.",
)
