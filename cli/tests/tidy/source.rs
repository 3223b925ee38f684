//! The tree as the rules see it: files, and Rust source with comments and literals blanked.

use std::fs;
use std::path::{Path, PathBuf};

/// One file of the project.
pub struct SourceFile {
    /// Path from the root of the project, with forward slashes.
    pub path: String,
    /// Bytes on disk.
    pub bytes: u64,
    /// Content, if it is UTF-8.
    pub text: Option<String>,
}

impl SourceFile {
    /// A file made up by a test of a rule.
    pub fn made_up(path: &str, text: &str) -> Self {
        Self {
            path: path.to_owned(),
            bytes: text.len() as u64,
            text: Some(text.to_owned()),
        }
    }

    /// Whether the name ends so.
    pub fn has_extension(&self, extension: &str) -> bool {
        Path::new(&self.path).extension().is_some_and(|e| e == extension)
    }

    /// The content of a Rust file with comments and literals blanked; nothing for other files.
    pub fn rust(&self) -> Option<String> {
        self.text
            .as_deref()
            .filter(|_| self.has_extension("rs"))
            .map(blank)
    }
}

/// Every file under `root` that its `.gitignore` does not name, sorted by path.
pub fn tree(root: &Path) -> Vec<SourceFile> {
    let ignore = fs::read_to_string(root.join(".gitignore")).expect("the project has a .gitignore");
    let patterns: Vec<&str> = ignore
        .lines()
        .filter(|l| !l.trim().is_empty() && !l.starts_with('#'))
        .collect();
    let mut files = Vec::new();
    walk(root, &PathBuf::new(), &patterns, &mut files);
    files.sort_by(|a, b| a.path.cmp(&b.path));
    files
}

fn walk(root: &Path, at: &Path, patterns: &[&str], files: &mut Vec<SourceFile>) {
    for entry in fs::read_dir(root.join(at)).expect("a readable directory") {
        let entry = entry.expect("a readable directory");
        let path = at.join(entry.file_name());
        let text = path.to_string_lossy().replace('\\', "/");
        let kind = entry.file_type().expect("a readable entry");
        if text == ".git" || ignored(&text, kind.is_dir(), patterns) {
            continue;
        }
        if kind.is_dir() {
            walk(root, &path, patterns, files);
        } else {
            let content = fs::read(entry.path()).unwrap_or_else(|e| panic!("{text}: {e}"));
            files.push(SourceFile {
                path: text,
                bytes: content.len() as u64,
                text: String::from_utf8(content).ok(),
            });
        }
    }
}

/// Git's rule for the patterns that this project uses: a leading slash ties to the root, a trailing one means
/// directories, one star stands for any part of a name.
pub fn ignored(path: &str, is_dir: bool, patterns: &[&str]) -> bool {
    patterns.iter().any(|pattern| {
        let name = pattern.trim_end_matches('/');
        let subject = match name.strip_prefix('/') {
            Some(_) => path,
            None => path.rsplit('/').next().unwrap_or(path),
        };
        (is_dir || !pattern.ends_with('/')) && glob(name.trim_start_matches('/'), subject)
    })
}

fn glob(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((head, tail)) => {
            text.len() >= head.len() + tail.len() && text.starts_with(head) && text.ends_with(tail)
        }
    }
}

/// `source` with every comment, string and character literal replaced by blanks; lines stay where they are.
pub fn blank(source: &str) -> String {
    let chars: Vec<char> = source.chars().collect();
    let mut out = String::with_capacity(source.len());
    let mut i = 0;
    while i < chars.len() {
        let end = literal_or_comment(&chars, i).unwrap_or(i);
        if end == i {
            out.push(chars[i]);
            i += 1;
        } else {
            out.extend(chars[i..end].iter().map(|c| if *c == '\n' { '\n' } else { ' ' }));
            i = end;
        }
    }
    out
}

/// Where the comment or literal that starts at `i` ends, if one starts there.
fn literal_or_comment(chars: &[char], i: usize) -> Option<usize> {
    let next = chars.get(i + 1).copied();
    match chars[i] {
        '/' if next == Some('/') => Some(
            chars[i..]
                .iter()
                .position(|c| *c == '\n')
                .map_or(chars.len(), |n| i + n),
        ),
        '/' if next == Some('*') => Some(block_comment(chars, i)),
        '"' => Some(quoted(chars, i, '"')),
        'r' if !(i > 0 && is_word(chars[i - 1]) && chars[i - 1] != 'b' && chars[i - 1] != 'c') => {
            let hashes = chars[i + 1..].iter().take_while(|c| **c == '#').count();
            (chars.get(i + 1 + hashes) == Some(&'"')).then(|| raw_string(chars, i + 2 + hashes, hashes))
        }
        // A lifetime has no closing quote after one character or an escape.
        '\'' if next == Some('\\') || chars.get(i + 2) == Some(&'\'') => Some(quoted(chars, i, '\'')),
        _ => None,
    }
}

fn block_comment(chars: &[char], start: usize) -> usize {
    let (mut depth, mut i) = (0usize, start);
    while i < chars.len() {
        match (chars[i], chars.get(i + 1)) {
            ('/', Some('*')) => (depth, i) = (depth + 1, i + 2),
            ('*', Some('/')) => (depth, i) = (depth - 1, i + 2),
            _ => i += 1,
        }
        if depth == 0 {
            break;
        }
    }
    i
}

fn quoted(chars: &[char], start: usize, quote: char) -> usize {
    let mut i = start + 1;
    while i < chars.len() && chars[i] != quote {
        i += if chars[i] == '\\' { 2 } else { 1 };
    }
    (i + 1).min(chars.len())
}

fn raw_string(chars: &[char], mut i: usize, hashes: usize) -> usize {
    while i < chars.len() {
        if chars[i] == '"' && chars[i + 1..].iter().take_while(|c| **c == '#').count() >= hashes {
            return i + 1 + hashes;
        }
        i += 1;
    }
    i
}

/// Whether the character can be part of a name.
pub fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Byte positions in `text` where `word` stands as a whole word.
pub fn words<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    text.match_indices(word).map(|(at, _)| at).filter(move |at| {
        let before = text[..*at].chars().next_back();
        let after = text[at + word.len()..].chars().next();
        !before.is_some_and(is_word) && !after.is_some_and(is_word)
    })
}

/// The line, from 1, of a byte position.
pub fn line_of(text: &str, at: usize) -> usize {
    text[..at].matches('\n').count() + 1
}

/// Name, first line and last line of every function with a body. `text` is blanked source.
pub fn functions(text: &str) -> Vec<(String, usize, usize)> {
    let mut found = Vec::new();
    for at in words(text, "fn") {
        let rest = &text[at + 2..];
        let name: String = rest.trim_start().chars().take_while(|c| is_word(*c)).collect();
        if name.is_empty() {
            continue; // a function pointer type
        }
        let Some(open) = body_start(rest) else { continue };
        let Some(len) = matching_brace(&rest[open..]) else {
            continue;
        };
        found.push((name, line_of(text, at), line_of(text, at + 2 + open + len)));
    }
    found
}

/// Where the body opens, unless the declaration ends with a semicolon.
fn body_start(rest: &str) -> Option<usize> {
    let mut depth = 0i32;
    for (i, c) in rest.char_indices() {
        match c {
            '(' | '[' => depth += 1,
            ')' | ']' => depth -= 1,
            '{' if depth == 0 => return Some(i),
            ';' if depth == 0 => return None,
            _ => {}
        }
    }
    None
}

fn matching_brace(text: &str) -> Option<usize> {
    let mut depth = 0i32;
    for (i, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(i);
        }
    }
    None
}
