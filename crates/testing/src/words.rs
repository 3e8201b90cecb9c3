//! Arguments of a program, as a list or as the line that a user would type.

/// Arguments of a program.
pub trait Words {
    /// One string for each argument.
    fn words(&self) -> Vec<String>;
}

/// Split at white space. Between `'` and `'` white space is part of the word, as in a shell.
impl Words for &str {
    fn words(&self) -> Vec<String> {
        let mut words = Vec::new();
        let (mut word, mut quoted) = (None::<String>, false);
        for character in self.chars() {
            match character {
                '\'' => {
                    quoted = !quoted;
                    word.get_or_insert_default();
                }
                _ if character.is_whitespace() && !quoted => words.extend(word.take()),
                _ => word.get_or_insert_default().push(character),
            }
        }
        assert!(!quoted, "a quote is open: {self}");
        words.extend(word);
        words
    }
}

impl Words for &String {
    fn words(&self) -> Vec<String> {
        self.as_str().words()
    }
}

impl<S: AsRef<str>> Words for &[S] {
    fn words(&self) -> Vec<String> {
        self.iter().map(|word| word.as_ref().to_owned()).collect()
    }
}

impl<S: AsRef<str>, const COUNT: usize> Words for &[S; COUNT] {
    fn words(&self) -> Vec<String> {
        self.as_slice().words()
    }
}

impl<S: AsRef<str>> Words for &Vec<S> {
    fn words(&self) -> Vec<String> {
        self.as_slice().words()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_split_as_a_shell_does() {
        let line = "-c 'write -P 1 0 64k' --name=a'b c'd '' disk";
        let words = ["-c", "write -P 1 0 64k", "--name=ab cd", "", "disk"];
        assert_eq!(line.words(), words);
        assert_eq!((&words).words(), words);
    }
}
