//! The kernel sources: which files there are and what kernels they declare. The build script reads this too.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A kernel as its source declares it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Declaration {
    /// Its name, unique in the crate.
    pub name: String,
    /// Most threads a block may have: a C++ expression.
    pub threads: String,
    /// Blocks that fit on a multiprocessor: a C++ expression.
    pub blocks: String,
    /// Type of its one argument.
    pub args: String,
    /// Registers a thread may take, from the line `// registers: N` above it.
    pub registers: Option<u32>,
    /// Line of the declaration, from 1.
    pub line: usize,
}

/// Every file below `root` whose name ends in `extension`, sorted.
///
/// # Errors
/// The folder cannot be read.
pub fn files(root: &Path, extension: &str) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == extension) {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

/// The kernels that `text` declares: `HZ_KERNEL(THREADS, BLOCKS) name(HZ_ARGS(Type, variable)) {`.
///
/// # Errors
/// A declaration of another form, as `line N: what is wrong`.
pub fn declarations(text: &str) -> Result<Vec<Declaration>, String> {
    let mut found = Vec::new();
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        if line.starts_with("HZ_KERNEL(") {
            let number = text[..at].matches('\n').count() + 1;
            let mut kernel = declaration(&text[at..]).ok_or_else(|| {
                format!("line {number}: a kernel is HZ_KERNEL(THREADS, BLOCKS) name(HZ_ARGS(Type, variable))")
            })?;
            kernel.line = number;
            kernel.registers = registers(&text[..at]).map_err(|e| format!("line {number}: {e}"))?;
            found.push(kernel);
        } else if line.contains("HZ_KERNEL(") && !line.trim_start().starts_with("//") {
            let number = text[..at].matches('\n').count() + 1;
            return Err(format!(
                "line {number}: HZ_KERNEL must stand at the start of its line"
            ));
        }
        at += line.len();
    }
    Ok(found)
}

fn declaration(text: &str) -> Option<Declaration> {
    let (bounds, rest) = parenthesized(text.strip_prefix("HZ_KERNEL")?)?;
    let rest = rest.trim_start();
    let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_')?;
    let (name, rest) = rest.split_at(end);
    let (parameters, _) = parenthesized(rest.trim_start())?;
    let (args, after) = parenthesized(parameters.trim().strip_prefix("HZ_ARGS")?)?;
    let (threads, blocks) = halves(bounds)?;
    let (kind, _) = halves(args)?;
    (!name.is_empty() && after.trim().is_empty()).then(|| Declaration {
        name: name.to_owned(),
        threads: threads.to_owned(),
        blocks: blocks.to_owned(),
        args: kind.to_owned(),
        registers: None,
        line: 0,
    })
}

/// What the parentheses that `text` starts with enclose, and the rest.
fn parenthesized(text: &str) -> Option<(&str, &str)> {
    let mut depth = 0usize;
    for (i, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.checked_sub(1)?,
            _ => {}
        }
        if depth == 0 {
            return (i > 0).then(|| (&text[1..i], &text[i + 1..]));
        }
    }
    None
}

/// Two parts of `text` at its last comma outside of brackets.
fn halves(text: &str) -> Option<(&str, &str)> {
    let mut depth = 0i32;
    let mut comma = None;
    for (i, c) in text.char_indices() {
        match c {
            '(' | '<' => depth += 1,
            ')' | '>' => depth -= 1,
            ',' if depth == 0 => comma = Some(i),
            _ => {}
        }
    }
    comma.map(|i| (text[..i].trim(), text[i + 1..].trim()))
}

/// The limit in the comment lines that `above` ends with.
fn registers(above: &str) -> Result<Option<u32>, String> {
    for line in above.lines().rev().take_while(|l| l.starts_with("//")) {
        if let Some(count) = line.strip_prefix("// registers:") {
            let count = count.trim();
            return match count.parse() {
                Ok(count) => Ok(Some(count)),
                Err(_) => Err(format!("`// registers: {count}` above it is no number")),
            };
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_found_with_their_bounds() {
        let text = "// head\nstruct A {};\n\n// What it does.\n// registers: 64\nHZ_KERNEL(32 * (A, 2), 2)\n\
                    first(HZ_ARGS(Pair<A, 1>, a)) {}\n// HZ_KERNEL(a)\nHZ_KERNEL(T, 1) second(HZ_ARGS(A, a)) {\n";
        let found = declarations(text).unwrap();
        let expected = |name: &str, threads: &str, blocks: &str, args: &str, registers, line| Declaration {
            name: name.to_owned(),
            threads: threads.to_owned(),
            blocks: blocks.to_owned(),
            args: args.to_owned(),
            registers,
            line,
        };
        assert_eq!(
            found,
            [
                expected("first", "32 * (A, 2)", "2", "Pair<A, 1>", Some(64), 6),
                expected("second", "T", "1", "A", None, 9),
            ]
        );
    }

    #[test]
    fn other_forms_are_refused_with_their_line() {
        for (text, line) in [
            ("HZ_KERNEL(32) f(HZ_ARGS(A, a)) {", 1),
            ("\nHZ_KERNEL(32, 1) f(const A a) {", 2),
            ("\nHZ_KERNEL(32, 1) f(HZ_ARGS(A, a), int b) {", 2),
            ("\n\nHZ_KERNEL(32, 1) f(HZ_ARGS(A, a) {", 3),
            ("// registers: many\nHZ_KERNEL(32, 1) f(HZ_ARGS(A, a)) {", 2),
            ("template <int N> HZ_KERNEL(32, 1) f(HZ_ARGS(A, a)) {", 1),
        ] {
            let error = declarations(text).unwrap_err();
            assert!(error.starts_with(&format!("line {line}: ")), "{text}: {error}");
        }
    }
}
