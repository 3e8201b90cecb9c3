//! What `help COMMAND` prints beyond one line. The lines that explain options, and the examples,
//! are QEMU's, since people search for them.

/// `aio_read`
pub const AIO_READ: &str = "
 asynchronously reads a range of bytes from the given offset

 Example:
 'aio_read -v 512 1k 1k ' - dumps 2 kilobytes read from 512 bytes into the file

 Starts a read and returns at once, which counts as success whatever comes of the
 read; 'aio_flush' waits for all that was started.
 -C, -- report statistics in a machine parsable format
 -i, -- treat request as invalid, for exercising stats
 -P, -- use a pattern to verify read data
 -q, -- quiet mode, do not show I/O statistics
 -r, -- register I/O buffer
 -v, -- dump buffer to standard output

";

/// `aio_write`
pub const AIO_WRITE: &str = "
 asynchronously writes a range of bytes from the given offset source
 from multiple buffers

 Example:
 'aio_write 512 1k 1k' - writes 2 kilobytes at 512 bytes into the open file

 Starts a write of the byte 0xcd, or of another one, and returns at once, which counts
 as success whatever comes of the write; 'aio_flush' waits for all that was started.
 -C, -- report statistics in a machine parsable format
 -f, -- use Force Unit Access semantics
 -i, -- treat request as invalid, for exercising stats
 -P, -- use different pattern to fill file
 -q, -- quiet mode, do not show I/O statistics
 -r, -- register I/O buffer
 -u, -- with -z, allow unmapping
 -z, -- write zeroes using blk_aio_pwrite_zeroes

";

/// `discard`
pub const DISCARD: &str = "
 discards a range of bytes from the given offset

 Example:
 'discard 512 1k' - discards 1 kilobyte from 512 bytes into the file

 -C, -- report statistics in a machine parsable format
 -q, -- quiet mode, do not show I/O statistics

";

/// `open`
pub const OPEN: &str = "
 opens a new file in the requested mode

 Example:
 'open -n -o driver=raw /tmp/data' - opens raw data file read-write, uncached

 The commands that follow work on this file.
 -r, -- open file read-only
 -s, -- use snapshot file
 -C, -- use copy-on-read
 -n, -- disable host cache, short for -t none
 -U, -- force shared permissions
 -k, -- use kernel AIO implementation (Linux only, prefer use of -i)
 -i, -- use AIO mode (threads, native or io_uring)
 -t, -- use the given cache mode for the image
 -d, -- use the given discard mode for the image
 -o, -- options to be given to the block driver
";

/// `read`
pub const READ: &str = "
 reads a range of bytes from the given offset

 Example:
 'read -v 512 1k' - dumps 1 kilobyte read from 512 bytes into the file

 -b, -- read from the VM state rather than the virtual disk
 -C, -- report statistics in a machine parsable format
 -l, -- length for pattern verification (only with -P)
 -p, -- ignored for backwards compatibility
 -P, -- use a pattern to verify read data
 -q, -- quiet mode, do not show I/O statistics
 -r, -- register I/O buffer
 -s, -- start offset for pattern verification (only with -P)
 -v, -- dump buffer to standard output

";

/// `readv`
pub const READV: &str = "
 reads a range of bytes from the given offset into multiple buffers

 Example:
 'readv -v 512 1k 1k ' - dumps 2 kilobytes read from 512 bytes into the file

 -C, -- report statistics in a machine parsable format
 -P, -- use a pattern to verify read data
 -q, -- quiet mode, do not show I/O statistics
 -r, -- register I/O buffer
 -v, -- dump buffer to standard output

";

/// `reopen`
pub const REOPEN: &str = "
 Changes the open options of an already opened image

 Example:
 'reopen -o lazy-refcounts=on' - activates lazy refcount writeback on a qcow2 image

 -r, -- Reopen the image read-only
 -w, -- Reopen the image read-write
 -c, -- Change the cache mode to the given value
 -o, -- Changes block driver options (cf. 'open' command)

";

/// `sigraise`
pub const SIGRAISE: &str = "
 raises the given signal

 Example:
 'sigraise 15' - raises SIGTERM

 The signal is given by its number.

";

/// `write`
pub const WRITE: &str = "
 writes a range of bytes from the given offset

 Example:
 'write 512 1k' - writes 1 kilobyte at 512 bytes into the open file

 What is written is the byte 0xcd, if no option says otherwise.
 -b, -- write to the VM state rather than the virtual disk
 -c, -- write compressed data with blk_write_compressed
 -C, -- report statistics in a machine parsable format
 -f, -- use Force Unit Access semantics
 -n, -- with -z, don't allow slow fallback
 -p, -- ignored for backwards compatibility
 -P, -- use different pattern to fill file
 -q, -- quiet mode, do not show I/O statistics
 -r, -- register I/O buffer
 -s, -- use a pattern file to fill the write buffer
 -u, -- with -z, allow unmapping
 -z, -- write zeroes using blk_pwrite_zeroes

";

/// `writev`
pub const WRITEV: &str = "
 writes a range of bytes from the given offset source from multiple buffers

 Example:
 'writev 512 1k 1k' - writes 2 kilobytes at 512 bytes into the open file

 What is written is the byte 0xcd, if no option says otherwise.
 -C, -- report statistics in a machine parsable format
 -f, -- use Force Unit Access semantics
 -P, -- use different pattern to fill file
 -q, -- quiet mode, do not show I/O statistics
 -r, -- register I/O buffer

";
