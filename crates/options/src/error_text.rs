//! [`error_text`]: an error as QEMU prints it.

/// The text of an error as QEMU prints it after the program's name: messages
/// from the outermost to the cause, joined by colons.
pub fn error_text(error: &vellum::Error) -> String {
    let mut text = error.message().to_owned();
    let mut next = std::error::Error::source(error);
    while let Some(source) = next {
        let message = match source.downcast_ref::<vellum::Error>() {
            Some(inner) => inner.message().to_owned(),
            None => source.to_string(),
        };
        if !message.is_empty() {
            text.push_str(": ");
            text.push_str(&message);
        }
        next = source.source();
    }
    text
}
