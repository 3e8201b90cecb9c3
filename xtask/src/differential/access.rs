//! The words of a command line that name an image, with the secret of an encrypted one.

use super::shape::Shape;

/// The secret of encrypted images.
pub const SECRET: &str = "secret,id=s,data=differential";

/// Creation options of encryption, with as few iterations as may be.
pub const ENCRYPT: &str = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=1";

fn owned(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}

/// The words that define what the options of the image refer to.
pub fn objects(shape: &Shape) -> Vec<String> {
    match shape.encrypted {
        true => owned(&["--object", SECRET]),
        false => Vec::new(),
    }
}

/// The image as driver options.
pub fn image_opts(shape: &Shape, image: &str) -> String {
    let key = match shape.encrypted {
        true => ",encrypt.key-secret=s",
        false => "",
    };
    format!("driver={},file.filename={image}{key}", shape.format())
}

/// The words that name one image.
pub fn image(shape: &Shape, image: &str) -> Vec<String> {
    if !shape.encrypted {
        return owned(&["-f", shape.format(), image]);
    }
    let mut words = objects(shape);
    words.extend(["--image-opts".to_owned(), image_opts(shape, image)]);
    words
}

/// The words that name two images to `compare`.
pub fn two_images(shape: &Shape, [first, second]: [&str; 2]) -> Vec<String> {
    if !shape.encrypted {
        return owned(&["-f", shape.format(), "-F", shape.format(), first, second]);
    }
    let mut words = image(shape, first);
    words.push(image_opts(shape, second));
    words
}
