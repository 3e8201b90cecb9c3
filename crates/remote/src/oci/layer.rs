//! A layer's bytes, packed or not. Everything here blocks, on threads for that.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use bytes::Bytes;
use flate2::Compression;
use flate2::read::MultiGzDecoder;
use flate2::write::GzEncoder;
use sha2::{Digest, Sha256};
use tokio::sync::mpsc::{Receiver, Sender};

use super::digest_text;
use super::manifest::Blob;
use super::tar::{self, Found};
use super::union::Union;

const PIECE_BYTES: usize = 256 << 10;
/// A disk changes little where it is compressed already, and this is fast.
const GZIP_LEVEL: u32 = 4;
const ZSTD_LEVEL: i32 = 3;

/// How a layer is packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Packing {
    /// Not at all: for images whose clusters are compressed.
    None,
    /// As every runtime knows it.
    #[default]
    Gzip,
    /// Faster and smaller; not of runtimes before 2020.
    Zstd,
}

impl Packing {
    /// What the layer's type ends with.
    pub(super) fn suffix(self) -> &'static str {
        match self {
            Packing::None => "",
            Packing::Gzip => "+gzip",
            Packing::Zstd => "+zstd",
        }
    }
}

/// Chunks that arrive.
struct Chunks {
    receiver: Receiver<Bytes>,
    current: Bytes,
}

impl Read for Chunks {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.current.is_empty() {
            match self.receiver.blocking_recv() {
                Some(chunk) => self.current = chunk,
                None => return Ok(0),
            }
        }
        let len = buffer.len().min(self.current.len());
        buffer[..len].copy_from_slice(&self.current.split_to(len));
        Ok(len)
    }
}

/// Writes the disk of a layer that arrives into a file, and takes all that comes behind it. `union`: what higher layers
/// hide, to which this one adds what it hides.
pub(super) fn unpack(
    receiver: Receiver<Bytes>,
    union: &mut Union,
    file: &File,
) -> io::Result<Option<Found>> {
    let mut chunks = Chunks {
        receiver,
        current: Bytes::new(),
    };
    let mut first = Vec::new();
    chunks.by_ref().take(4).read_to_end(&mut first)?;
    let mut all = io::Cursor::new(first.clone()).chain(&mut chunks);
    let found = match first.as_slice() {
        [0x1f, 0x8b, ..] => tar::extract(&mut MultiGzDecoder::new(&mut all), union, file),
        [0x28, 0xb5, 0x2f, 0xfd] => {
            let mut unpacked = zstd::stream::read::Decoder::new(&mut all)?;
            tar::extract(&mut unpacked, union, file)
        }
        _ => tar::extract(&mut all, union, file),
    }?;
    io::copy(&mut chunks, &mut io::sink())?;
    Ok(found)
}

/// A layer that was made.
pub(super) struct Layer {
    pub(super) blob: Blob,
    /// The digest of the archive before it was packed.
    pub(super) archive_digest: String,
    pub(super) content: Content,
}

/// Bytes to send: some before a file, the file, and some behind it.
#[derive(Clone)]
pub(super) struct Content {
    before: Bytes,
    file: Arc<File>,
    file_bytes: u64,
    behind: Bytes,
}

impl Content {
    /// Bytes without a file.
    pub(super) fn of(bytes: Vec<u8>, file: Arc<File>) -> Content {
        Content {
            before: bytes.into(),
            file,
            file_bytes: 0,
            behind: Bytes::new(),
        }
    }

    fn each(&self, mut take: impl FnMut(Bytes) -> io::Result<()>) -> io::Result<()> {
        take(self.before.clone())?;
        let mut at = 0;
        while at < self.file_bytes {
            let len = (self.file_bytes - at).min(PIECE_BYTES as u64) as usize;
            let mut piece = vec![0; len];
            self.file.read_exact_at(&mut piece, at)?;
            take(piece.into())?;
            at += len as u64;
        }
        take(self.behind.clone())
    }

    /// Sends all of it, unless nobody takes it any more.
    pub(super) fn send(&self, sender: &Sender<io::Result<Bytes>>) {
        let gone = || io::Error::from(io::ErrorKind::BrokenPipe);
        let sent = self.each(|piece| sender.blocking_send(Ok(piece)).map_err(|_| gone()));
        if let Err(error) = sent {
            let _ = sender.blocking_send(Err(error));
        }
    }
}

/// Makes a layer that holds a file as `disk/NAME`.
pub(super) fn pack(file: Arc<File>, name: &str, packing: Packing) -> io::Result<Layer> {
    let file_bytes = file.metadata()?.len();
    let archive = Content {
        before: tar::before(name, file_bytes).into(),
        file,
        file_bytes,
        behind: tar::behind(file_bytes).into(),
    };
    if packing == Packing::None {
        let mut hashed = Hashed::new(io::sink());
        archive.each(|piece| hashed.write_all(&piece))?;
        let (_, blob) = hashed.finish();
        return Ok(Layer {
            archive_digest: blob.digest.clone(),
            blob,
            content: archive,
        });
    }
    let packed = Hashed::new(tempfile::tempfile()?);
    let (archive_digest, (mut packed, blob)) = match packing {
        Packing::Zstd => {
            let encoder = zstd::stream::write::Encoder::new(packed, ZSTD_LEVEL)?;
            let (digest, encoder) = packed_by(&archive, encoder)?;
            (digest, encoder.finish()?.finish())
        }
        Packing::None | Packing::Gzip => {
            let encoder = GzEncoder::new(packed, Compression::new(GZIP_LEVEL));
            let (digest, encoder) = packed_by(&archive, encoder)?;
            (digest, encoder.finish()?.finish())
        }
    };
    packed.seek(SeekFrom::Start(0))?;
    let content = Content {
        before: Bytes::new(),
        file: Arc::new(packed),
        file_bytes: blob.len_bytes,
        behind: Bytes::new(),
    };
    Ok(Layer {
        blob,
        archive_digest,
        content,
    })
}

/// Gives an archive to an encoder; its digest.
fn packed_by<W: Write>(archive: &Content, encoder: W) -> io::Result<(String, W)> {
    let mut hashed = Hashed::new(encoder);
    archive.each(|piece| hashed.write_all(&piece))?;
    let (encoder, blob) = hashed.finish();
    Ok((blob.digest, encoder))
}

/// Passes bytes on, and hashes them.
struct Hashed<W> {
    inner: W,
    digest: Sha256,
    len_bytes: u64,
}

impl<W> Hashed<W> {
    fn new(inner: W) -> Hashed<W> {
        Hashed {
            inner,
            digest: Sha256::new(),
            len_bytes: 0,
        }
    }

    fn finish(self) -> (W, Blob) {
        let blob = Blob {
            digest: digest_text(self.digest.finalize()),
            len_bytes: self.len_bytes,
        };
        (self.inner, blob)
    }
}

impl<W: Write> Write for Hashed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let len = self.inner.write(bytes)?;
        self.digest.update(&bytes[..len]);
        self.len_bytes += len as u64;
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}
