//! What the assembler says about each kernel, as a table and as findings.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use horizon_kernels_cuda::sources::Declaration;

/// What a kernel takes on one architecture.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Registers a thread.
    pub registers: u32,
    /// Bytes of local memory a thread.
    pub stack: u32,
    /// Bytes stored and loaded because registers ran out.
    pub spills: u32,
    /// Bytes of static shared memory.
    pub shared: u32,
}

/// Usage of every kernel in the assembler's messages. Functions that a kernel calls count with it.
pub fn parse(log: &str) -> BTreeMap<String, Usage> {
    let mut found: BTreeMap<String, Usage> = BTreeMap::new();
    let mut kernel = String::new();
    for line in log.lines() {
        let number = |after: &str| number_before(line, after);
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            kernel = rest.split('\'').next().unwrap_or_default().to_owned();
            found.entry(kernel.clone()).or_default();
        } else if let Some(usage) = found.get_mut(&kernel) {
            usage.stack += number(" bytes stack frame");
            usage.stack += number(" bytes cumulative stack size");
            usage.spills += number(" bytes spill stores") + number(" bytes spill loads");
            usage.registers = usage.registers.max(number(" registers"));
            usage.shared += number(" bytes smem");
        }
    }
    found
}

/// The number that stands right before `word`, or 0.
fn number_before(line: &str, word: &str) -> u32 {
    let Some(end) = line.find(word) else { return 0 };
    let digits = line[..end]
        .rfind(|c: char| !c.is_ascii_digit())
        .map_or(0, |i| i + 1);
    line[digits..end].parse().unwrap_or(0)
}

/// The compiler's warnings.
pub fn warnings(log: &str) -> Vec<String> {
    let is_warning = |l: &&str| l.contains("warning") || l.contains(": remark");
    log.lines().filter(is_warning).map(str::to_owned).collect()
}

/// One kernel with its usage on each architecture.
pub struct Row {
    /// File below `src`.
    pub file: String,
    /// As declared.
    pub kernel: Declaration,
    /// (architecture, usage), in the order of the table's columns.
    pub usage: Vec<(&'static str, Usage)>,
}

impl Row {
    /// What must not be.
    pub fn findings(&self) -> Vec<String> {
        let (name, line) = (&self.kernel.name, self.kernel.line);
        let at = format!("{}:{line}: {name}", self.file);
        let Some(limit) = self.kernel.registers else {
            return vec![format!(
                "{at}: no line `// registers: N` above it states its limit"
            )];
        };
        let mut found = Vec::new();
        for (arch, usage) in &self.usage {
            let mut say = |what: String| found.push(format!("{at}: {arch}: {what}"));
            if usage.registers > limit {
                say(format!(
                    "{} registers, more than the limit {limit}",
                    usage.registers
                ));
            }
            if usage.spills > 0 {
                say(format!("{} bytes of spills", usage.spills));
            }
            if usage.stack > 0 {
                say(format!("{} bytes of local memory", usage.stack));
            }
            if usage.shared > 0 {
                say(format!("{} bytes of static shared memory", usage.shared));
            }
        }
        found
    }
}

/// The table that is kept beside the images.
pub fn table(head: &str, rows: &[Row]) -> String {
    let archs: Vec<&str> = rows
        .first()
        .map_or(Vec::new(), |r| r.usage.iter().map(|(a, _)| *a).collect());
    let width = rows.iter().map(|r| r.kernel.name.len()).max().unwrap_or(0).max(6);
    let mut text =
        format!("{head}\n\nRegisters a thread; s and l: bytes of spills and of local memory, if any.\n");
    let mut file = "";
    for row in rows {
        if row.file != file {
            file = &row.file;
            let mut line = format!("{file:<width$}  limit", width = width + 2);
            for arch in &archs {
                let _ = write!(line, " {arch:>7}");
            }
            let _ = writeln!(text, "\n{line}");
        }
        let limit = row.kernel.registers.map_or("none".to_owned(), |n| n.to_string());
        let _ = write!(text, "  {:<width$}  {limit:>5}", row.kernel.name);
        for (_, usage) in &row.usage {
            let mut cell = usage.registers.to_string();
            for (mark, bytes) in [("s", usage.spills), ("l", usage.stack), ("m", usage.shared)] {
                if bytes > 0 {
                    let _ = write!(cell, "{mark}{bytes}");
                }
            }
            let _ = write!(text, " {cell:>7}");
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
layers/a.cu(3): warning #177-D: variable \"x\" was declared but never referenced
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90'
ptxas info    : Function properties for first
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16 bytes cumulative stack size, 400 bytes cmem[0]
ptxas info    : Compiling entry function 'second' for 'sm_90'
ptxas info    : Function properties for second
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 1024 bytes smem
";

    #[test]
    fn the_log_is_understood_and_every_excess_is_found() {
        let usage = parse(LOG);
        assert_eq!(
            usage["first"],
            Usage {
                registers: 40,
                stack: 32,
                spills: 20,
                shared: 0
            }
        );
        assert_eq!(
            usage["second"],
            Usage {
                registers: 255,
                stack: 0,
                spills: 0,
                shared: 1024
            }
        );
        assert_eq!(warnings(LOG).len(), 1);
        let row = |registers, usage| Row {
            file: "a.cu".to_owned(),
            kernel: Declaration {
                name: "k".to_owned(),
                threads: "32".to_owned(),
                blocks: "1".to_owned(),
                args: "A".to_owned(),
                registers,
                line: 7,
            },
            usage: vec![("sm_90", usage)],
        };
        assert_eq!(row(Some(40), usage["first"]).findings().len(), 2);
        assert_eq!(row(Some(39), usage["first"]).findings().len(), 3);
        assert_eq!(row(Some(255), usage["second"]).findings().len(), 1);
        assert_eq!(
            row(
                Some(8),
                Usage {
                    registers: 8,
                    ..Usage::default()
                }
            )
            .findings(),
            Vec::<String>::new()
        );
        assert_eq!(row(None, Usage::default()).findings().len(), 1);
        assert!(table("head", &[row(Some(40), usage["first"])]).contains("40s20l32"));
    }
}
