//! The language of the declarations. They are a part of the program: what is wrong with them
//! fails a test.

use std::iter::Peekable;
use std::vec::IntoIter;

/// A declaration.
#[derive(Debug, Clone)]
pub(super) struct Declaration {
    pub(super) name: String,
    pub(super) features: Vec<String>,
    pub(super) kind: Kind,
}

#[derive(Debug, Clone)]
pub(super) enum Kind {
    /// A command or an event.
    Call {
        /// The name of a type, or members.
        argument: Result<String, Vec<Member>>,
        result: Option<String>,
    },
    Enum(Vec<Word>),
    Object {
        members: Vec<Member>,
        /// The member that says which variant it is, and the variants by its value.
        tag: Option<(String, Vec<(String, String)>)>,
    },
    Alternate(Vec<String>),
}

#[derive(Debug, Clone)]
pub(super) struct Member {
    pub(super) name: String,
    pub(super) type_name: String,
    pub(super) is_optional: bool,
    pub(super) features: Vec<String>,
}

/// A value of an enumeration.
#[derive(Debug, Clone)]
pub(super) struct Word {
    pub(super) text: String,
    pub(super) features: Vec<String>,
}

/// All declarations of a file.
pub(super) fn declarations(text: &str) -> Vec<Declaration> {
    let mut found: Vec<String> = Vec::new();
    for line in text.lines() {
        match (line.starts_with(' '), found.last_mut()) {
            (true, Some(last)) => last.push_str(line),
            _ => found.push(line.to_owned()),
        }
    }
    found
        .iter()
        .map(|text| Tokens::of(text).declaration())
        .collect()
}

struct Tokens {
    words: Peekable<IntoIter<String>>,
}

const PUNCTUATION: [char; 7] = ['{', '}', ',', ':', '[', ']', '?'];

impl Tokens {
    fn of(text: &str) -> Self {
        let mut spaced = String::new();
        for letter in text.chars() {
            match PUNCTUATION.contains(&letter) {
                true => spaced.extend([' ', letter, ' ']),
                false => spaced.push(letter),
            }
        }
        let words: Vec<String> = spaced.split_whitespace().map(str::to_owned).collect();
        Tokens {
            words: words.into_iter().peekable(),
        }
    }

    fn next(&mut self) -> String {
        self.words.next().expect("a declaration is whole")
    }

    fn is_next(&mut self, word: &str) -> bool {
        self.words.peek().is_some_and(|next| next == word)
    }

    fn expect(&mut self, word: &str) {
        let next = self.next();
        assert_eq!(next, word, "a declaration is well formed");
    }

    fn features(&mut self) -> Vec<String> {
        let mut features = Vec::new();
        while let Some(word) = self.words.next_if(|word| word.starts_with('!')) {
            features.push(word[1..].to_owned());
        }
        features
    }

    fn type_name(&mut self) -> String {
        let word = self.next();
        if word != "[" {
            return word;
        }
        let inner = self.next();
        self.expect("]");
        format!("[{inner}]")
    }

    /// What stands between braces, with commas between.
    fn list<T>(&mut self, mut item: impl FnMut(&mut Self) -> T) -> Vec<T> {
        self.expect("{");
        let mut items = Vec::new();
        while !self.is_next("}") {
            items.push(item(self));
            if self.is_next(",") {
                self.next();
            }
        }
        self.expect("}");
        items
    }

    fn member(&mut self) -> Member {
        let is_optional = self.is_next("?");
        if is_optional {
            self.next();
        }
        let name = self.next();
        self.expect(":");
        Member {
            name,
            type_name: self.type_name(),
            is_optional,
            features: self.features(),
        }
    }

    fn declaration(&mut self) -> Declaration {
        let what = self.next();
        let name = self.next();
        let features = self.features();
        let kind = match what.as_str() {
            "command" | "event" => self.call(),
            "enum" => Kind::Enum(self.list(|tokens| Word {
                text: tokens.next(),
                features: tokens.features(),
            })),
            "alternate" => Kind::Alternate(self.list(Tokens::type_name)),
            "object" => {
                let members = self.list(Tokens::member);
                let has_variants = self.is_next("by");
                let tag = has_variants.then(|| {
                    self.next();
                    let tag = self.next();
                    let variants = self.list(|tokens| {
                        let value = tokens.next();
                        tokens.expect(":");
                        (value, tokens.type_name())
                    });
                    (tag, variants)
                });
                Kind::Object { members, tag }
            }
            other => panic!("'{other}' begins no declaration"),
        };
        assert_eq!(self.words.next(), None, "nothing follows a declaration");
        Declaration {
            name,
            features,
            kind,
        }
    }

    fn call(&mut self) -> Kind {
        let argument = match self.is_next("{") {
            true => Err(self.list(Tokens::member)),
            false => Ok(self.type_name()),
        };
        let has_result = self.is_next("->");
        let result = has_result.then(|| {
            self.next();
            self.type_name()
        });
        Kind::Call { argument, result }
    }
}
