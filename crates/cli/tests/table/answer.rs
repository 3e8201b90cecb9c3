//! What a command said and left behind, line by line, without what differs from run to run.

/// Everything that is compared, as lines.
pub type Answer = Vec<String>;

/// The lines of an output, each with the name of its stream.
pub fn output_lines(stream: &str, bytes: &[u8], folder: &str) -> Vec<String> {
    let text = String::from_utf8_lossy(bytes).replace(folder, "@FOLDER");
    let mut lines: Vec<String> = text
        .split('\n')
        .map(|line| format!("{stream}: {}", steady(line).replace('\r', "\\r")))
        .collect();
    // What follows the last newline is no line, unless it says something.
    match text.ends_with('\n') || text.is_empty() {
        true => drop(lines.pop()),
        false => lines.last_mut().into_iter().for_each(|l| l.push_str("\\c")),
    }
    lines
}

/// Words after which a line tells something that no two runs share, and what that is.
const UNSTEADY: &[(&str, &str)] = &[
    ("disk size: ", "blocks of the host's file system"),
    ("\"actual-size\": ", "blocks of the host's file system"),
    ("file length: ", "where an allocator puts things"),
    ("Image end offset: ", "where an allocator puts things"),
    (
        "                \"virtual-size\": ",
        "the length of a file: where an allocator puts things",
    ),
    (
        "% allocated, ",
        "fragmentation: where an allocator puts things",
    ),
    ("uuid: ", "chance"),
    ("\"uuid\": ", "chance"),
    ("iters: ", "the speed of this machine"),
    ("iters\": ", "the speed of this machine"),
    ("\"date-sec\": ", "the time"),
    ("\"date-nsec\": ", "the time"),
    ("Run completed in ", "how long it took"),
    (" ops; ", "how long it took"),
    (",1,0:00:0", "how long it took"),
    ("version 10.0.2 ", "whose build it is"),
];

/// Length of `YYYY-MM-DD HH:MM:SS`.
const DATE_LEN: usize = 19;

fn steady(line: &str) -> String {
    for (word, _) in UNSTEADY {
        if let Some((head, _)) = line.split_once(word) {
            return format!("{head}{word}?");
        }
    }
    // A node without a name gets a number: how many there were before.
    if let Some((head, tail)) = line.split_once("#block") {
        let rest = tail.trim_start_matches(|letter: char| letter.is_ascii_digit());
        return format!("{head}#block?{rest}");
    }
    // A row of the table of snapshots: the time.
    match line.find("  0000:00:00.000 ") {
        Some(clock) if clock > DATE_LEN => {
            format!("{}?{}", &line[..clock - DATE_LEN], &line[clock..])
        }
        _ => line.to_owned(),
    }
}

/// The lines that only one of two answers has: `-` theirs, `+` ours, in order.
pub fn difference(theirs: &[String], ours: &[String]) -> Vec<String> {
    // common[i][j] is the length of the longest common part of theirs[i..] and ours[j..].
    let mut common = vec![vec![0_usize; ours.len() + 1]; theirs.len() + 1];
    for i in (0..theirs.len()).rev() {
        for j in (0..ours.len()).rev() {
            common[i][j] = match theirs[i] == ours[j] {
                true => common[i + 1][j + 1] + 1,
                false => common[i + 1][j].max(common[i][j + 1]),
            };
        }
    }
    let (mut i, mut j) = (0, 0);
    let mut found = Vec::new();
    while i < theirs.len() || j < ours.len() {
        if i < theirs.len() && j < ours.len() && theirs[i] == ours[j] {
            (i, j) = (i + 1, j + 1);
        } else if j == ours.len() || (i < theirs.len() && common[i + 1][j] >= common[i][j + 1]) {
            found.push(format!("- {}", theirs[i]));
            i += 1;
        } else {
            found.push(format!("+ {}", ours[j]));
            j += 1;
        }
    }
    found
}
