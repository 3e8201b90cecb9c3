//! [`Sealed`]: the seal that an image's header leads to.

use std::sync::Arc;

use vellum_format::Header;
use vellum_format::extension::kind;
use vellum_format::features::Autoclear;
use vellum_format::header::first_cluster_size_bytes;
use vellum_format::seal::{LEAF_BYTES, NODE_BYTES, SealPointer, Superblock, header_hash};
use vellum_io::{Error, ErrorKind, Result};
use vellum_storage::Storage;

use super::tree::Tree;
use crate::qcow2::header::load::read_bytes;
use crate::qcow2::integrity::errors::bad_format;

/// Is told how many bytes of the disk have been dealt with, and of how many.
pub type SealProgress = Arc<dyn Fn(u64, u64) + Send + Sync>;

/// Whether reads of a sealed image are compared with its seal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum VerifyReads {
    /// No read is.
    Off,
    /// Each leaf of 4 KiB is when it is first read, and not again while the image is open.
    First,
    /// Every read is.
    Always,
}

impl VerifyReads {
    /// The mode of a name as the option `verify` takes it.
    pub fn parse(name: &str) -> Option<VerifyReads> {
        match name {
            "off" => Some(VerifyReads::Off),
            "first" => Some(VerifyReads::First),
            "on" => Some(VerifyReads::Always),
            _ => None,
        }
    }
}

/// What the seal of an image says of itself. Nothing was compared with the image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SealInfo {
    /// What is vouched for, line by line: the text that a signature is made of.
    pub statement: String,
    /// The hash at the top of the tree over the content, in hexadecimal digits; `None`: the
    /// image holds nothing itself.
    pub root: Option<String>,
    /// The hashes have a secret key: the image is encrypted.
    pub keyed: bool,
    /// The text of a minisign signature of the statement, where it was signed.
    pub signature: Option<String>,
    /// Bytes that the seal takes in the file.
    pub length_bytes: u64,
}

impl SealInfo {
    pub(super) fn new(superblock: &Superblock) -> SealInfo {
        let root = superblock.content.map(|root| hex(&root.hash));
        let signature = String::from_utf8_lossy(&superblock.signature);
        SealInfo {
            statement: superblock.statement(),
            root,
            keyed: superblock.keyed,
            signature: (!signature.is_empty()).then(|| signature.into_owned()),
            length_bytes: superblock.length_bytes,
        }
    }

    /// What the seal of the image in `file` says; `None` where the image has none.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] where the header says that there is a seal, and none can be read.
    pub async fn read(file: &Arc<dyn Storage>, header: &Header) -> Result<Option<SealInfo>> {
        match is_sealed(header) {
            false => Ok(None),
            true => Ok(Some(SealInfo::new(
                &Sealed::read(file, header).await?.superblock,
            ))),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Whether the header vouches for a seal.
pub(crate) fn is_sealed(header: &Header) -> bool {
    header.autoclear.contains(Autoclear::SEALED)
}

/// Guest bytes of an image that are held together or not at all, as leaves see it.
pub(super) fn unit_bytes(header: &Header) -> u32 {
    let grain = header.geometry().subcluster_size_bytes();
    grain.min(LEAF_BYTES) as u32
}

/// Bytes of a slice of an L2 table.
pub(super) fn slice_bytes(header: &Header) -> u32 {
    header.geometry().cluster_size_bytes().min(4096) as u32
}

/// The seal of an image: where it is, and what its superblock says.
#[derive(Debug, Clone)]
pub(super) struct Sealed {
    pub(super) pointer: SealPointer,
    pub(super) superblock: Superblock,
}

impl Sealed {
    /// Reads the seal that `header` leads to, and checks that it is one of such an image.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`], with what is wrong.
    pub(super) async fn read(file: &Arc<dyn Storage>, header: &Header) -> Result<Sealed> {
        let pointer = pointer(header).map_err(|why| broken(file, why))?;
        let block = read_bytes(file, pointer.offset_bytes, NODE_BYTES as u64).await?;
        let superblock = Superblock::decode(&block)
            .map_err(|error| bad_format("read seal", &error).target(file.name()))?;
        let fits = superblock.length_bytes == pointer.length_bytes && !superblock.detached;
        if !fits {
            return Err(broken(file, "the header and the seal disagree"));
        }
        Ok(Sealed {
            pointer,
            superblock,
        })
    }

    /// What is wrong with the image's header by the seal, if something is.
    pub(super) async fn header_fault(
        &self,
        file: &Arc<dyn Storage>,
        header: &Header,
    ) -> Result<Option<&'static str>> {
        let bytes = read_bytes(file, 0, header.geometry().cluster_size_bytes()).await?;
        let hash = match first_cluster_size_bytes(&bytes) {
            Ok(_) => header_hash(&bytes).ok(),
            Err(_) => None,
        };
        let superblock = &self.superblock;
        let per_table = u64::from(slices_per_table(header));
        let agrees = hash == Some(superblock.header)
            && superblock.size_bytes == header.guest_size_bytes()
            && superblock.unit_bytes == unit_bytes(header)
            && superblock.slice_bytes == slice_bytes(header)
            && superblock.mapping_slices == u64::from(header.l1_entries) * per_table;
        Ok((!agrees).then_some("the header is not the one that was sealed"))
    }

    /// The tree over the content.
    pub(super) fn content(&self, file: &Arc<dyn Storage>) -> Tree {
        let superblock = &self.superblock;
        let area = (file.clone(), self.pointer.offset_bytes);
        let shape = superblock.content_shape();
        Tree::new(area, superblock.length_bytes, shape, superblock.content)
    }

    /// The tree over the mapping.
    pub(super) fn mapping(&self, file: &Arc<dyn Storage>) -> Tree {
        let superblock = &self.superblock;
        let area = (file.clone(), self.pointer.offset_bytes);
        let shape = superblock.mapping_shape();
        Tree::new(area, superblock.length_bytes, shape, superblock.mapping)
    }
}

/// Slices that an L2 table consists of.
pub(super) fn slices_per_table(header: &Header) -> u32 {
    let cluster = header.geometry().cluster_size_bytes();
    (cluster / u64::from(slice_bytes(header))) as u32
}

/// What the header says of the place of the seal.
pub(super) fn pointer(header: &Header) -> std::result::Result<SealPointer, String> {
    let found = header.unknown_extension(kind::SEAL);
    let data = found.ok_or("the header does not say where the seal is")?;
    let cluster = header.geometry().cluster_size_bytes();
    SealPointer::decode(data, cluster).map_err(|error| error.to_string())
}

pub(super) fn broken(file: &Arc<dyn Storage>, why: impl Into<String>) -> Error {
    Error::new(ErrorKind::Corrupt, "read seal", why).target(file.name())
}

/// Refuses to change a sealed image.
///
/// # Errors
/// [`ErrorKind::ReadOnly`] where it is sealed.
pub(crate) fn refuse_sealed(file: &Arc<dyn Storage>, header: &Header) -> Result<()> {
    if !is_sealed(header) {
        return Ok(());
    }
    let message = "The image is sealed and not to be changed; 'vellum seal --unseal', or the \
                   option unseal=on, gives the seal up";
    Err(Error::new(ErrorKind::ReadOnly, "open", message).target(file.name()))
}
