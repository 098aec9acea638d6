//! The text of an algorithm: parses and prints elements and attributes.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::error::{ImportError, ImportProblem};
use super::{
    Algorithm, Buffer, Gpu, Instruction, InstructionKind, MAX_CHUNK_STEPS, MAX_GPUS, MAX_XML_BYTES,
    ThreadBlock,
};

/// Most characters of the text that an error repeats.
const MAX_FOUND_CHARS: usize = 40;
/// Most attributes of an element; the runtimes read 16.
const MAX_ATTRIBUTES: usize = 32;
/// Most chunks of a buffer: the runtimes number them by 16 bits with a sign.
const MAX_BUFFER_CHUNKS: u32 = i16::MAX as u32;
/// Most thread blocks of a GPU that are read: 32 channels of 32.
const MAX_BLOCKS_READ: usize = 1_024;

type Result<T> = std::result::Result<T, ImportError>;

/// An opening or closing tag.
struct Tag<'a> {
    name: &'a str,
    line: usize,
    attributes: BTreeMap<&'a str, &'a str>,
    is_closing: bool,
    /// It ends itself: `<name/>`.
    is_whole: bool,
}

struct Reader<'a> {
    left: &'a str,
    line: usize,
}

/// Reads the text.
pub(super) fn parse(text: &str) -> Result<Algorithm> {
    let mut reader = Reader { left: text, line: 1 };
    if text.len() > MAX_XML_BYTES {
        return Err(reader.too_many("bytes of XML", MAX_XML_BYTES as u64));
    }
    let tag = reader.opening("'<algo'", "algo")?;
    let mut algorithm = Algorithm {
        name: tag.attributes.get("name").map(|name| shortened(name)).unwrap_or_default(),
        collective: shortened(tag.text("algo", "coll")?),
        root: tag.optional("root", MAX_GPUS)?,
        channels: tag.optional("nchannels", u32::from(u16::MAX))?.unwrap_or(1),
        chunks: tag.number("algo", "nchunksperloop", MAX_BUFFER_CHUNKS)?,
        in_place: tag.flag("inplace")?.unwrap_or(false),
        out_of_place: false,
        gpus: Vec::new(),
    };
    let out_of_place = tag.flag("outofplace")?;
    algorithm.out_of_place = out_of_place.unwrap_or(!algorithm.in_place);
    if !algorithm.in_place && !algorithm.out_of_place {
        algorithm.out_of_place = true;
    }
    let gpus = tag.number("algo", "ngpus", MAX_GPUS)?;
    let mut read: BTreeMap<u32, Gpu> = BTreeMap::new();
    let mut chunk_steps = 0;
    while let Some(tag) = reader.inside(&tag, "gpu", "'<gpu' or '</algo>'")? {
        let number = tag.number("gpu", "id", MAX_GPUS)?;
        let gpu = gpu(&mut reader, &tag, &mut chunk_steps)?;
        if number >= gpus || read.insert(number, gpu).is_some() {
            return Err(tag.wrong(ImportProblem::Numbering { what: "GPU", number }));
        }
    }
    if let Some(number) = (0..gpus).find(|number| !read.contains_key(number)) {
        return Err(tag.wrong(ImportProblem::Numbering { what: "GPU", number }));
    }
    if gpus == 0 {
        return Err(tag.wrong(ImportProblem::Value {
            attribute: "ngpus",
            value: "0".to_owned(),
            what: "at least 1",
        }));
    }
    algorithm.gpus = read.into_values().collect();
    reader.skip_blank()?;
    if !reader.left.is_empty() {
        return Err(reader.expected("the end of the file"));
    }
    Ok(algorithm)
}

fn gpu(reader: &mut Reader<'_>, tag: &Tag<'_>, chunk_steps: &mut u64) -> Result<Gpu> {
    let chunks = |name| tag.number("gpu", name, MAX_BUFFER_CHUNKS);
    let mut gpu = Gpu {
        input_chunks: chunks("i_chunks")?,
        output_chunks: chunks("o_chunks")?,
        scratch_chunks: chunks("s_chunks")?,
        blocks: Vec::new(),
    };
    let mut read: BTreeMap<u32, ThreadBlock> = BTreeMap::new();
    while let Some(tag) = reader.inside(tag, "tb", "'<tb' or '</gpu>'")? {
        let number = tag.number("tb", "id", MAX_BLOCKS_READ as u32)?;
        let block = thread_block(reader, &tag, chunk_steps)?;
        if read.insert(number, block).is_some() {
            return Err(tag.wrong(ImportProblem::Numbering { what: "thread block", number }));
        }
    }
    if let Some((&number, block)) =
        read.iter().enumerate().find(|(index, (number, _))| *index as u32 != **number).map(|(_, found)| found)
    {
        return Err(ImportError {
            line: block.line,
            problem: ImportProblem::Numbering { what: "thread block", number },
        });
    }
    gpu.blocks = read.into_values().collect();
    Ok(gpu)
}

fn thread_block(reader: &mut Reader<'_>, tag: &Tag<'_>, chunk_steps: &mut u64) -> Result<ThreadBlock> {
    let mut block = ThreadBlock {
        send: tag.number_or_none("tb", "send", MAX_GPUS)?,
        receive: tag.number_or_none("tb", "recv", MAX_GPUS)?,
        channel: tag.number_or_none("tb", "chan", u32::from(u16::MAX))?.unwrap_or(0),
        line: tag.line,
        steps: Vec::new(),
    };
    while let Some(tag) = reader.inside(tag, "step", "'<step' or '</tb>'")? {
        let number = tag.number("step", "s", u32::from(u16::MAX))?;
        if number as usize != block.steps.len() {
            return Err(tag.wrong(ImportProblem::Numbering { what: "step", number }));
        }
        let step = step(&tag)?;
        *chunk_steps += u64::from(step.count.max(1));
        if *chunk_steps > MAX_CHUNK_STEPS {
            return Err(reader.too_many("steps, each counted as often as it has chunks", MAX_CHUNK_STEPS));
        }
        block.steps.push(step);
        if !tag.is_whole {
            reader.closing("step")?;
        }
    }
    Ok(block)
}

fn step(tag: &Tag<'_>) -> Result<Instruction> {
    const TYPES: &str = "s, r, rcs, rrc, rrs, rrcs, cpy, re or nop";
    let name = tag.text("step", "type")?;
    let kind = InstructionKind::ALL.into_iter().find(|&(_, known)| known == name).map(|(kind, _)| kind);
    let kind = kind.ok_or_else(|| {
        tag.wrong(ImportProblem::Value { attribute: "type", value: shortened(name), what: TYPES })
    })?;
    let is_nothing = kind == InstructionKind::Nothing;
    let place = |buffer: &'static str, offset: &'static str, is_used: bool| -> Result<(Buffer, u32)> {
        let name = tag.text("step", buffer)?;
        let known = match name {
            "i" => Buffer::Input,
            "o" => Buffer::Output,
            "s" => Buffer::Scratch,
            _ => {
                return Err(tag.wrong(ImportProblem::Value {
                    attribute: buffer,
                    value: shortened(name),
                    what: "i, o or s",
                }));
            }
        };
        let number = if is_used {
            tag.number("step", offset, MAX_BUFFER_CHUNKS)?
        } else {
            tag.number_or_none("step", offset, MAX_BUFFER_CHUNKS)?.unwrap_or(0)
        };
        Ok((known, number))
    };
    let depends_on = tag.number_or_none("step", "depid", MAX_BLOCKS_READ as u32)?;
    let step = tag.number_or_none("step", "deps", u32::from(u16::MAX))?;
    let count = tag.number("step", "cnt", MAX_BUFFER_CHUNKS)?;
    if count == 0 && !is_nothing {
        return Err(tag.wrong(ImportProblem::Value {
            attribute: "cnt",
            value: "0".to_owned(),
            what: "at least 1",
        }));
    }
    Ok(Instruction {
        kind,
        source: place("srcbuf", "srcoff", kind.reads_source())?,
        target: place("dstbuf", "dstoff", kind.writes_target())?,
        count: if is_nothing { 0 } else { count },
        after: depends_on.zip(step),
        is_waited_for: tag.flag("hasdep")?.unwrap_or(false),
        line: tag.line,
    })
}

impl<'a> Tag<'a> {
    fn wrong(&self, problem: ImportProblem) -> ImportError {
        ImportError { line: self.line, problem }
    }

    fn text(&self, element: &'static str, attribute: &'static str) -> Result<&'a str> {
        let value = self.attributes.get(attribute).copied();
        value.ok_or_else(|| self.wrong(ImportProblem::NoAttribute { element, attribute }))
    }

    fn number(&self, element: &'static str, attribute: &'static str, most: u32) -> Result<u32> {
        let value = self.text(element, attribute)?;
        self.parsed(attribute, value, most)
    }

    fn parsed(&self, attribute: &'static str, value: &str, most: u32) -> Result<u32> {
        value.parse().ok().filter(|&number| number <= most).ok_or_else(|| {
            let what = "a number, not too large";
            self.wrong(ImportProblem::Value { attribute, value: shortened(value), what })
        })
    }

    /// The format writes -1 for none.
    fn number_or_none(
        &self,
        element: &'static str,
        attribute: &'static str,
        most: u32,
    ) -> Result<Option<u32>> {
        match self.text(element, attribute)? {
            "-1" => Ok(None),
            value => self.parsed(attribute, value, most).map(Some),
        }
    }

    fn optional(&self, attribute: &'static str, most: u32) -> Result<Option<u32>> {
        self.attributes.get(attribute).map(|value| self.parsed(attribute, value, most)).transpose()
    }

    fn flag(&self, attribute: &'static str) -> Result<Option<bool>> {
        Ok(self.optional(attribute, 1)?.map(|value| value == 1))
    }
}

impl<'a> Reader<'a> {
    fn wrong(&self, problem: ImportProblem) -> ImportError {
        ImportError { line: self.line, problem }
    }

    fn expected(&self, what: &'static str) -> ImportError {
        let found = self.left.lines().next().unwrap_or_default().trim();
        let found = if found.is_empty() {
            "the end of the file".to_owned()
        } else {
            format!("'{}'", shortened(found))
        };
        self.wrong(ImportProblem::Expected { what, found })
    }

    fn too_many(&self, what: &'static str, most: u64) -> ImportError {
        self.wrong(ImportProblem::TooMany { what, most })
    }

    fn advance(&mut self, bytes: usize) -> &'a str {
        let (passed, left) = self.left.split_at(bytes);
        self.line += passed.matches('\n').count();
        self.left = left;
        passed
    }

    /// Blanks, comments and what says which XML it is.
    fn skip_blank(&mut self) -> Result<()> {
        loop {
            let blanks = self.left.len() - self.left.trim_start().len();
            self.advance(blanks);
            let end = match self.left {
                comment if comment.starts_with("<!--") => comment.find("-->").map(|at| at + 3),
                declaration if declaration.starts_with("<?") => declaration.find("?>").map(|at| at + 2),
                _ => return Ok(()),
            };
            let end = end.ok_or_else(|| self.expected("the end of a comment"))?;
            self.advance(end);
        }
    }

    fn tag(&mut self, what: &'static str) -> Result<Tag<'a>> {
        self.skip_blank()?;
        let line = self.line;
        if !self.left.starts_with('<') {
            return Err(self.expected(what));
        }
        let is_closing = self.left.starts_with("</");
        self.advance(if is_closing { 2 } else { 1 });
        let name = self.word();
        let mut tag = Tag { name, line, attributes: BTreeMap::new(), is_closing, is_whole: false };
        loop {
            let blanks = self.left.len() - self.left.trim_start().len();
            self.advance(blanks);
            if self.left.starts_with('>') {
                self.advance(1);
                return Ok(tag);
            }
            if self.left.starts_with("/>") && !is_closing {
                self.advance(2);
                tag.is_whole = true;
                return Ok(tag);
            }
            let name = self.word();
            if name.is_empty() || is_closing || !self.left.starts_with('=') {
                return Err(self.expected("an attribute, as name=\"value\", or '>'"));
            }
            self.advance(1);
            let quote = self.left.chars().next().filter(|quote| matches!(quote, '"' | '\''));
            let Some(quote) = quote else { return Err(self.expected("a value in quotes")) };
            let end = self.left[1..].find(quote).ok_or_else(|| self.expected("a value in quotes"))?;
            let value = &self.left[1..=end];
            if tag.attributes.insert(name, value).is_some() {
                return Err(self.expected("each attribute once"));
            }
            if tag.attributes.len() > MAX_ATTRIBUTES {
                return Err(self.too_many("attributes", MAX_ATTRIBUTES as u64));
            }
            self.advance(end + 2);
        }
    }

    fn word(&mut self) -> &'a str {
        let is_part = |character: char| character.is_ascii_alphanumeric() || "_-:.".contains(character);
        let end = self.left.find(|character| !is_part(character)).unwrap_or(self.left.len());
        self.advance(end)
    }

    fn opening(&mut self, what: &'static str, name: &str) -> Result<Tag<'a>> {
        self.skip_blank()?;
        let before = (self.left, self.line);
        let tag = self.tag(what)?;
        if tag.name != name || tag.is_closing || tag.is_whole {
            (self.left, self.line) = before;
            return Err(self.expected(what));
        }
        Ok(tag)
    }

    /// The next element inside of another one; none at its end.
    fn inside(&mut self, outer: &Tag<'_>, name: &str, what: &'static str) -> Result<Option<Tag<'a>>> {
        if outer.is_whole {
            return Ok(None);
        }
        self.skip_blank()?;
        let before = (self.left, self.line);
        let tag = self.tag(what)?;
        if tag.is_closing && tag.name == outer.name {
            Ok(None)
        } else if !tag.is_closing && tag.name == name {
            Ok(Some(tag))
        } else {
            (self.left, self.line) = before;
            Err(self.expected(what))
        }
    }

    fn closing(&mut self, name: &str) -> Result<()> {
        let tag = self.tag("a closing tag")?;
        if tag.is_closing && tag.name == name {
            Ok(())
        } else {
            Err(tag.wrong(ImportProblem::Expected { what: "a closing tag", found: shortened(tag.name) }))
        }
    }
}

fn shortened(text: &str) -> String {
    let mut short: String = text.chars().take(MAX_FOUND_CHARS).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}

/// Writes the text, in the order of attributes that the runtimes' own files have.
pub(super) fn print(algorithm: &Algorithm) -> String {
    let mut out = String::new();
    let Algorithm { name, collective, channels, chunks, gpus, .. } = algorithm;
    let flag = |is_so: bool| u8::from(is_so);
    let root = algorithm.root.map(|root| format!(" root=\"{root}\"")).unwrap_or_default();
    // Writing into a String takes all.
    let _ = writeln!(
        out,
        "<algo name=\"{name}\" proto=\"Simple\" nchannels=\"{channels}\" nchunksperloop=\"{chunks}\" ngpus=\"{}\" \
         coll=\"{collective}\" inplace=\"{}\" outofplace=\"{}\" minBytes=\"0\" maxBytes=\"1099511627776\"{root}>",
        gpus.len(),
        flag(algorithm.in_place),
        flag(algorithm.out_of_place)
    );
    for (number, gpu) in gpus.iter().enumerate() {
        let _ = writeln!(
            out,
            "  <gpu id=\"{number}\" i_chunks=\"{}\" o_chunks=\"{}\" s_chunks=\"{}\">",
            gpu.input_chunks, gpu.output_chunks, gpu.scratch_chunks
        );
        for (number, block) in gpu.blocks.iter().enumerate() {
            let peer = |peer: Option<u32>| peer.map_or("-1".to_owned(), |peer| peer.to_string());
            let (send, receive) = (peer(block.send), peer(block.receive));
            let _ = writeln!(
                out,
                "    <tb id=\"{number}\" send=\"{send}\" recv=\"{receive}\" chan=\"{}\">",
                block.channel
            );
            for (number, step) in block.steps.iter().enumerate() {
                print_step(&mut out, number, step);
            }
            out.push_str("    </tb>\n");
        }
        out.push_str("  </gpu>\n");
    }
    out.push_str("</algo>\n");
    out
}

fn print_step(out: &mut String, number: usize, step: &Instruction) {
    let kind =
        InstructionKind::ALL.into_iter().find(|&(kind, _)| kind == step.kind).map_or("nop", |(_, name)| name);
    let buffer = |buffer| match buffer {
        Buffer::Input => "i",
        Buffer::Output => "o",
        Buffer::Scratch => "s",
    };
    let (block, after) = match step.after {
        Some((block, after)) => (block.to_string(), after.to_string()),
        None => ("-1".to_owned(), "-1".to_owned()),
    };
    let _ = writeln!(
        out,
        "      <step s=\"{number}\" type=\"{kind}\" srcbuf=\"{}\" srcoff=\"{}\" dstbuf=\"{}\" dstoff=\"{}\" cnt=\"{}\" \
         depid=\"{block}\" deps=\"{after}\" hasdep=\"{}\"/>",
        buffer(step.source.0),
        step.source.1,
        buffer(step.target.0),
        step.target.1,
        step.count,
        u8::from(step.is_waited_for)
    );
}
